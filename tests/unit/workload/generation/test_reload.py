"""vLLM's own reload of layers whose weights it loads in ways that this reload does not expect."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, GptOssConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import reload

from grpo_workload.generation.audit import audited
from grpo_workload.weights.differ import WeightsDifferError
from grpo_workload.weights.digest import with_sums


class Sinks(nn.Module):
    """A layer that the model writes to."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4), requires_grad=False)


class Norm(nn.Module):
    """A layer with the loader of MiniMax-M2's norms."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.weight.weight_loader = partial(load_shard, rank=1)


FAULTS: list[Callable[[Tensor], object]] = []
"""Faults after a copy."""


def load_shard(param, loaded_weight, rank=0):
    param.data.copy_(loaded_weight[2 * rank : 2 * rank + 2])
    for fault in FAULTS if not param.is_meta else ():
        fault(param.data)


class Model(nn.Module):
    """Loads weights as vLLM's gpt-oss does on the second rank of tensor parallelism."""

    config = GptOssConfig()

    def __init__(self):
        super().__init__()
        self.attn, self.norm = Sinks(), Norm()

    def load_weights(self, weights):
        loaded, parameters = set(), dict(self.named_parameters())
        for name, tensor in weights:
            if name.endswith("sinks"):
                parameters[name].data.copy_(tensor)
                tensor.zero_()
            else:
                parameters[name].weight_loader(parameters[name], tensor)
            loaded.add(name)
        return loaded


def push(model, **weights):
    """Load weights as a vLLM worker does; names have `_` in place of the dot."""
    with audited(model, is_initial=False, is_quantized=False):
        reload.initialize_layerwise_reload(model)
        model.load_weights(with_sums([(name.replace("_", "."), one) for name, one in weights.items()], "cpu"))
        reload.finalize_layerwise_reload(model, None)  # the configuration is that of attention layers


@pytest.fixture
def model():
    made = Model()
    reload.record_metadata_for_reloading(made)
    return made


def test_each_push_fills_the_tensors_that_the_engine_has_and_changes_none_of_the_trainer(model):
    own = [parameter.data_ptr() for parameter in model.parameters()]
    for value in (1.0, 2.0):
        sinks, norm = torch.full((4,), value), torch.arange(4) * value
        push(model, attn_sinks=sinks, norm_weight=norm)
        assert model.attn.sinks.tolist() == [value] * 4 == sinks.tolist()
        assert model.norm.weight.tolist() == [2 * value, 3 * value]
    assert [parameter.data_ptr() for parameter in model.parameters()] == own


def test_what_the_model_writes_itself_must_arrive_too(model):
    with pytest.raises(WeightsDifferError, match=r"the push has no weights, or too few, for attn\.sinks$"):
        push(model, norm_weight=torch.ones(4))


def test_a_layer_whose_weights_have_another_form_in_the_engine_is_refused(model):
    model.attn.sinks = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"^attn\.sinks is not kept as checkpoints have it$"):
        push(model, attn_sinks=torch.ones(4), norm_weight=torch.ones(4))


class Method(QuantizeMethodBase):
    """Changes the form of a layer's weights."""

    def __init__(self):
        self.change = lambda weight: weight.flip(0)

    def create_weights(self, *_args, **_options): ...

    def apply(self, *_args): ...

    def process_weights_after_loading(self, layer):
        layer.weight = nn.Parameter(self.change(layer.weight.data), requires_grad=False)


class Packed(Norm):
    """A layer that keeps its weights in another form."""

    def __init__(self):
        super().__init__()
        self.quant_method = Method()


@pytest.fixture
def packed(model):
    model.norm = Packed()
    reload.record_metadata_for_reloading(model)
    return model


HOLDS_NOT = r"^weights differ: norm\.weight does not hold what vLLM's loaders copied into it"


def flipped(weight):
    weight.view(torch.int32)[0] ^= 1
    return weight


def test_a_parameter_that_does_not_hold_what_was_copied_is_named_at_the_first_push_too(model, monkeypatch):
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "FAULTS", [flipped])
            with pytest.raises(WeightsDifferError, match=HOLDS_NOT):
                push(model, attn_sinks=torch.ones(4), norm_weight=torch.arange(4.0))
        push(model, attn_sinks=torch.ones(4), norm_weight=torch.arange(4.0))


def test_an_order_that_the_engine_has_changed_once_is_learnt_and_named_and_may_not_change_bits(packed, caplog):
    push(packed, attn_sinks=torch.ones(4), norm_weight=torch.zeros(4))  # of which nothing can be learnt
    push(packed, attn_sinks=torch.ones(4), norm_weight=torch.arange(4.0))
    push(packed, attn_sinks=torch.ones(4), norm_weight=torch.ones(4))
    assert packed.norm.weight.tolist() == [1, 1]
    assert caplog.messages == ["vLLM keeps these weights in another order: norm.weight"]
    packed.norm.quant_method.change = flipped
    with pytest.raises(WeightsDifferError, match=HOLDS_NOT):
        push(packed, attn_sinks=torch.ones(4), norm_weight=torch.arange(4.0))


def test_before_a_layer_changes_the_form_of_its_weights_they_are_compared(packed, caplog, monkeypatch):
    packed.norm.quant_method.change = torch.exp
    for value in (1.0, 2.0):
        push(packed, attn_sinks=torch.ones(4), norm_weight=torch.arange(4) * value)
    assert caplog.messages == ["vLLM keeps these weights in another form: norm.weight"]
    monkeypatch.setitem(globals(), "FAULTS", [flipped])
    with pytest.raises(WeightsDifferError, match=HOLDS_NOT):
        push(packed, attn_sinks=torch.ones(4), norm_weight=torch.arange(4.0))


class WithTower(nn.Module):
    """A vision-language model as vLLM marks it, but for its loading."""

    _tower_model_names = ("visual",)

    def __init__(self, family):
        super().__init__()
        self.config = AutoConfig.for_model(family)
        self.visual, self.text = Norm(), Norm()

    load_weights = Model.load_weights


@pytest.mark.parametrize(("family", "is_missed"), [("qwen3_5", False), ("qwen3_vl", True)])
def test_a_tower_that_is_not_trained_needs_no_weights(family, is_missed):
    model = WithTower(family)
    reload.record_metadata_for_reloading(model)
    with pytest.raises(WeightsDifferError, match="for visual ") if is_missed else nullcontext():
        push(model, text_weight=torch.ones(4))
    with pytest.raises(WeightsDifferError, match="for text " if not is_missed else "for text .*, visual "):
        push(model)
