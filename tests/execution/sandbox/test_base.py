"""The contract of all sandboxes, without isolation, and choosing a sandbox by name."""

import pytest

from loopwright.execution.sandbox import Bounds, SandboxError, sandbox_of
from loopwright.testing import SandboxContract

NO_BOUNDS = Bounds()


class TestNone(SandboxContract):
    def make_sandbox(self, bounds=NO_BOUNDS):
        return sandbox_of("none", bounds)


def test_an_unknown_name_is_refused():
    with pytest.raises(SandboxError, match="Known: none, bwrap, docker"):
        sandbox_of("chroot")
