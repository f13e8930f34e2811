"""Docker sandboxes against a real daemon, if there is one that has the default image."""

import sys
from pathlib import Path

import pytest
from tests.execution.sandbox.fake_docker import IMAGE, has_real_image

from loopwright.execution.sandbox import Bounds, sandbox_of
from loopwright.testing import IsolationContract, SandboxContract

NO_BOUNDS = Bounds()


@pytest.mark.skipif(not has_real_image(), reason=f"needs a Docker daemon with {IMAGE}")
class TestDockerDaemon(SandboxContract):
    """What an image's own files and programs do not decide. Bounds on CPU and disk are refused."""

    def make_sandbox(self, bounds=NO_BOUNDS):
        return sandbox_of("docker", bounds, (Path(sys.prefix), Path(sys.base_prefix)))

    test_nothing_can_be_written_outside = IsolationContract.test_nothing_can_be_written_outside
    test_processes_outside_are_invisible = IsolationContract.test_processes_outside_are_invisible
    test_no_other_address_is_reachable = IsolationContract.test_no_other_address_is_reachable
    test_kernel_keys_are_out_of_reach = IsolationContract.test_kernel_keys_are_out_of_reach
    test_a_system_call_filter_is_on = IsolationContract.test_a_system_call_filter_is_on
    test_no_privileges_can_be_gained = IsolationContract.test_no_privileges_can_be_gained
    test_a_fork_bomb_is_contained = IsolationContract.test_a_fork_bomb_is_contained
    test_instances_are_separate = IsolationContract.test_instances_are_separate
    test_nothing_is_left_of_an_instance = IsolationContract.test_nothing_is_left_of_an_instance
    test_the_workspace_is_mounted_at_its_path = IsolationContract.test_the_workspace_is_mounted_at_its_path
    test_mounts_are_for_one_command = IsolationContract.test_mounts_are_for_one_command
    test_links_do_not_redirect_later_mounts = IsolationContract.test_links_do_not_redirect_later_mounts
