"""Sandboxes: what a foreign process may see and reach, and what is left of it."""

from loopwright.execution.sandbox.base import Bounds, NoSandbox, Sandbox, SandboxError, SandboxInstance, sandbox_of

__all__ = ["Bounds", "NoSandbox", "Sandbox", "SandboxError", "SandboxInstance", "sandbox_of"]
