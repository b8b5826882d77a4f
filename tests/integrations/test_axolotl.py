"""The Axolotl plugin, registered and called by Axolotl's own plugin manager, with its own configuration."""

import copy
import logging

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers")
pytest.importorskip("axolotl", reason="needs axolotl")

from axolotl.integrations.base import PluginManager  # noqa: E402
from axolotl.integrations.config import merge_input_args  # noqa: E402
from axolotl.utils.dict import DictDefault  # noqa: E402
from integrations.huggingface.families import assert_alike, batch, made, step  # noqa: E402

import onepass  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # Axolotl's own
NAME = "onepass.integrations.axolotl.OnepassPlugin"
CONFIG = {"base_model": "none", "learning_rate": 1e-4, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "plugins": [NAME]}


@pytest.fixture(autouse=True)
def _by_pytorch():
    with onepass.use_backend("torch"):
        yield


@pytest.fixture
def manager():
    manager = PluginManager.get_instance()
    manager.register(NAME)
    yield manager
    manager.plugins.clear()


def configuration(**given):
    _, checked = merge_input_args()
    more = {"datasets": [{"path": "none", "type": "alpaca"}]}
    return DictDefault(checked(**CONFIG, **more, **given).model_dump(exclude_none=True))


def test_the_model_that_axolotl_has_loaded_is_replaced(manager, caplog):
    caplog.set_level(logging.INFO, logger="onepass")
    model = made("Llama")
    expected = step(copy.deepcopy(model), **batch())
    manager.post_model_load(configuration(), model)
    applied = manager.plugins[NAME].applied
    assert {row.part for row in applied.replaced} == {"norm", "mlp", "rope", "qkv", "loss"}
    assert "linear_cross_entropy" in caplog.text
    assert_alike(step(model, **batch()), expected)
    applied.undo()


def test_its_options_are_those_of_apply(manager):
    model = made("Llama", hidden_size=64, intermediate_size=96)
    manager.post_model_load(configuration(onepass={"loss": False, "precision": "fp8"}), model)
    parts = {row.part for row in manager.plugins[NAME].applied.replaced}
    assert "loss" not in parts and "precision" in parts


@pytest.mark.parametrize("option", ({"main_grad": True}, {"losses": False}, {"precision": "fp4"}))
def test_an_option_that_it_has_not_is_refused_by_name(manager, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        configuration(onepass=option)


def test_adapters_are_there_already(manager):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(made("Llama"), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    torch.nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    expected = step(copy.deepcopy(model), **batch())
    manager.post_model_load(configuration(), model)
    assert_alike(step(model, **batch()), expected)
