"""What an actor does, without a cluster."""

import asyncio

from loopwright.execution.base import Command
from loopwright.execution.ray.host import HostRunner, HostSettings

SETTINGS = HostSettings(files="shared", output_bytes=1000, grace_s=1.0, artifact_bytes=1000, gpus=0)


def test_a_late_cancel_ends_no_other_trial(tmp_path):
    """Given two trials one after another, a cancel of the first ends that one only, also if it comes late or early."""

    def sleep(name: str, seconds: str) -> Command:
        directory = tmp_path / name
        directory.mkdir()
        environment = {"PATH": "/bin:/usr/bin"}
        return Command(
            ("sleep", seconds), directory, environment, directory / "stdout", directory / "stderr", None, name
        )

    async def main() -> None:
        runner = HostRunner(SETTINGS)
        await runner.start("")
        first = asyncio.ensure_future(runner.use("first", sleep("first", "60"), None))
        await asyncio.sleep(0.2)
        runner.cancel("first")
        assert (await first).cancelled
        second = asyncio.ensure_future(runner.use("second", sleep("second", "0.5"), None))
        await asyncio.sleep(0.1)
        runner.cancel("first")
        assert (await second).value.exit_code == 0
        runner.cancel("third")
        assert (await runner.use("third", sleep("third", "60"), None)).cancelled
        await runner.close()

    asyncio.run(main())


def test_a_trial_may_be_sent_as_what_differs_from_the_last_one(tmp_path):
    """Given the changes only, a command keeps all else of the last one, with the environment of this actor."""

    async def main() -> None:
        runner = HostRunner(SETTINGS)
        await runner.start("")
        script = ("sh", "-c", 'echo "$NAME $0"', "first")
        command = Command(script, tmp_path, {"NAME": "mine"}, tmp_path / "stdout", tmp_path / "stderr")
        await runner.use("first", command, None)
        assert (tmp_path / "stdout").read_text() == "mine first\n"
        await runner.use("second", {"argv": (*script[:3], "second")}, None)
        assert (tmp_path / "stdout").read_text() == "mine second\n"
        await runner.close()

    asyncio.run(main())
