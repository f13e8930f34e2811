"""Disks that are full, read-only or damaged: a message that helps, nothing recorded is lost, and `resume` continues."""

import gc
import os
import shutil
import subprocess

import aiohttp
import openai
import pytest

from loopwright.core.errors import StorageError
from loopwright.core.outcome import Outcome
from tests.contracts.harness import FunctionEnv, ListedAgent
from tests.gateway.clients import chat
from tests.gateway.harness import client_of, run, serve, user
from tests.survival.campaign import SCENARIO, Campaign

NOISY = """#!/bin/sh
head -c $2 /dev/zero
echo "y: $1 z: 0"
"""
TRIALS = 24


def scenario(output_bytes=10):
    return SCENARIO.format(
        parallel=2,
        agent='{ type = "grid" }',
        reward='{ type = "identity", metrics = ["y"] }',
        run="",
        workload="",
        args=f"a = {list(range(TRIALS))}\nb = {output_bytes}",
        more="",
    )


def mount(*arguments):
    return subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path):
    """A disk of half a megabyte."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=512k", "tmpfs", disk):
        pytest.skip("this container may not mount")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(disk, leaving):
    """Leave this many bytes free."""
    free = shutil.disk_usage(disk).free
    (disk / "ballast").write_bytes(b"x" * max(0, free - leaving))


# -- full ---------------------------------------------------------------------------------------------------------


def moments():
    """Free KiB and output per trial: in some cases the output fails first, in others the ledger."""
    for free in (8, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 400):
        for output_bytes in (10, 30_000):
            some = (free, output_bytes) in ((8, 10), (96, 10), (192, 10), (256, 10), (288, 30_000))
            yield pytest.param(free, output_bytes, marks=() if some else pytest.mark.slow)


@pytest.mark.parametrize(("free", "output_bytes"), [*moments()])
def test_a_full_disk_stops_the_campaign_and_freed_space_lets_it_continue(tmp_path, disk, free, output_bytes):
    campaign = Campaign(tmp_path / "home", scenario(output_bytes), work=NOISY, output=disk / "out")
    fill(disk, free * 1024)

    stopped = campaign.call()

    assert stopped.code == 1
    assert "Traceback" not in stopped.err
    assert "full" in stopped.err
    assert str(disk) in stopped.err
    assert campaign.left_running() == []

    assert mount("-o", "remount,size=64m", disk)
    resumed = campaign.call("resume" if (campaign.output / "campaign.json").exists() else "run")

    assert (resumed.code, resumed.err) == (0, "")
    assert campaign.numbers() == list(range(1, TRIALS + 1))
    assert {trial.outcome for trial in campaign.trials()} == {Outcome.OK}
    assert campaign.left_running() == []


def test_parallel_trials_on_a_full_disk_give_one_error(tmp_path, caplog):
    def refuse(_):
        raise StorageError("the disk is full")

    agent = ListedAgent(FunctionEnv(tmp_path, refuse), [{"x": 1}, {"x": 2}, {"x": 3}], parallel=3)

    with pytest.raises(StorageError, match="the disk is full"):
        agent.run()

    gc.collect()
    assert caplog.text == ""


# -- read-only ----------------------------------------------------------------------------------------------------


def test_a_read_only_output_directory_is_refused_before_anything_runs(tmp_path, disk):
    campaign = Campaign(tmp_path / "home", scenario(), work=NOISY, output=disk / "out")
    assert mount("-o", "remount,ro", disk)

    result = campaign.call()

    assert result.code == 1
    assert result.err == (
        f"error: cannot write to {campaign.output}: it is read-only. Make it writable, or choose another --output; "
        "nothing was started.\n"
    )


def test_a_campaign_on_a_read_only_disk_can_be_read_and_says_why_it_cannot_continue(tmp_path, disk):
    campaign = Campaign(tmp_path / "home", scenario(), work=NOISY, output=disk / "out")
    assert mount("-o", "remount,size=64m", disk)
    assert campaign.call().code == 0
    assert mount("-o", "remount,ro", disk)

    result = campaign.call("resume")

    assert result.code == 1
    assert "read-only" in result.err
    assert "Traceback" not in result.err
    assert campaign.numbers() == list(range(1, TRIALS + 1))


# -- damaged ------------------------------------------------------------------------------------------------------


def overwrite_the_middle(content):
    return content[: len(content) // 3] + b"\xa5" * (len(content) // 3) + content[len(content) // 3 * 2 :]


DAMAGE = {
    "overwritten": overwrite_the_middle,
    "truncated": lambda content: content[: len(content) // 2],
    "cut in a page": lambda content: content[:5000],
    "no database": lambda _: b"this is a letter to my aunt\n" * 100,
    "empty": lambda _: b"",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A completed campaign."""
    campaign = Campaign(tmp_path_factory.mktemp("whole"), scenario(), work=NOISY)
    assert campaign.call().code == 0
    return campaign


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_ledger_is_reported_and_unchanged(whole, tmp_path, how):
    output = tmp_path / "out"
    shutil.copytree(whole.output, output, symlinks=True)
    damaged = Campaign(tmp_path / "home", scenario(), work=NOISY, output=output)
    content = DAMAGE[how](damaged.ledger.read_bytes())
    damaged.ledger.write_bytes(content)

    result = damaged.call("resume")

    assert result.code == 1
    assert "Traceback" not in result.err
    assert str(damaged.ledger) in result.err
    assert "damaged" in result.err or "is not a ledger" in result.err
    assert damaged.ledger.read_bytes() == content


def test_a_gateway_whose_calls_do_not_fit_on_its_disk_is_not_healthy(disk):
    async def healthy(http, gateway):
        async with http.get(f"{gateway.address}/healthz") as answer:
            return answer.status == 200, await answer.json()

    async def story():
        async with (
            serve(output=disk) as gateway,
            aiohttp.ClientSession() as http,
            client_of(await gateway.open()) as client,
        ):
            await chat(client, [user("small")])
            assert (await healthy(http, gateway))[0]
            for number in range(3):
                with pytest.raises(openai.InternalServerError, match="cannot be recorded"):
                    await chat(client, [user(f"{number}" + "x" * 300_000)])
                assert await healthy(http, gateway) == (
                    False,
                    {"status": "failing", "version": 0, "failing": ["store"]},
                )
            assert not list(disk.glob("*probe*"))
            assert mount("-o", "remount,size=64m", disk)
            assert (await healthy(http, gateway))[0]
            await chat(client, [user("3" + "x" * 300_000)])
            assert (await healthy(http, gateway))[0]

    run(story)
