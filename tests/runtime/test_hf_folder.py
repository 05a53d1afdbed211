"""What is exported is what transformers loads: same weights, same logits."""

from pathlib import Path

import pytest
import torch

from loadmaster.cli.main import main
from loadmaster.errors import InvalidInput
from loadmaster.runtime.hf_folder import export_hf
from loadmaster.runtime.modules import build_module, find_blocks, vocab_size
from loadmaster.runtime.save import Saver
from loadmaster.runtime.state import StateShard

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
    "max_position_embeddings": 32,
}  # fmt: skip


def save(folder: Path, config: dict, module: torch.nn.Module) -> None:
    shards = [
        StateShard(
            name=name, kind="param", full_shape=tuple(p.shape), start=0, stop=p.numel(), tensor=p.detach().view(-1)
        )
        for name, p in module.named_parameters()
    ]
    Saver(folder / "checkpoints").save(7, shards, {"config": config})


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_it(tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    config = {**CONFIG, "tie_word_embeddings": tied}
    module = build_module(config=config, seed=3)
    save(tmp_path / "run", config, module)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "run"), "--to", "hf", "-o", str(tmp_path / "model")])
    assert ended.value.code == 0
    assert "model.safetensors" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, module.eval()(ids).logits)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no checkpoint"):
        export_hf(tmp_path, tmp_path / "model")
    save(tmp_path, None, torch.nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="only a Hugging Face config"):
        export_hf(tmp_path, tmp_path / "model")
    save(tmp_path / "b", CONFIG, torch.nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="holds files already"):
        export_hf(tmp_path / "b", tmp_path)
    assert not (tmp_path / "model").exists()


def test_modules_are_seeded_and_their_blocks_found() -> None:
    first, again, other = (build_module(config=CONFIG, seed=seed) for seed in (1, 1, 2))
    weights = [m.state_dict()["model.embed_tokens.weight"] for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert list(find_blocks(first)) == ["model.layers.0", "model.layers.1"]
    assert vocab_size(first) == 64
    for given, match in (
        ({"config": {**CONFIG, "model_type": "unheard-of"}}, "transformers builds no"),
        ({"factory": "nothing"}, "write package.module:function"),
        ({"factory": "os:getcwd"}, "return a torch.nn.Module"),
        ({"factory": "not_there:make"}, "cannot be called"),
        ({}, "needs a config or a factory"),
    ):
        with pytest.raises(InvalidInput, match=match):
            build_module(**given)
