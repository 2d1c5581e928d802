"""model_config.py, and the shape of the project: eleven files, imports in one direction, no dead settings."""

import ast
import subprocess
import sys
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import pytest

from model_config import PRESETS, Config, ModelConfig, config_from_dict, preset

ROOT = Path(__file__).resolve().parent.parent
# imports may only point to a lower level
LEVELS = {
    "model_config": 0,
    "custom_kernels": 1,
    "recurrent_layers": 2,
    "attention_layers": 2,
    "hybrid_model": 3,
    "spectral_optimizer": 4,
    "scheduler": 4,
    "dataset_pipeline": 4,
    "train_engine": 5,
    "generation_engine": 5,
    "main": 6,
}


def test_specified_attributes_and_values():
    expected = dict(
        layers=32, hidden_dim=3584, ffn_dim=11008, num_query_heads=28, num_kv_heads=4, head_dim=128, vocab_size=65536,
        recurrent_layers=24, attention_layers=8, recurrent_heads=28, recurrent_key_dim=128, recurrent_value_dim=128,
        max_context_len=1048576, max_output_len=131072, sliding_window_size=8192, rope_base_theta=5000000.0,
        rms_norm_eps=0.000001, hypersphere_radius=59.866,
    )  # fmt: skip
    config = ModelConfig()
    stored = {f.name for f in fields(ModelConfig)}
    for name, value in expected.items():
        assert name in stored and getattr(config, name) == value, name


def test_r1_parameter_count():
    config = ModelConfig()
    assert config.embedding_parameters == 234_881_024
    assert config.feed_forward_parameters == 118_358_016
    assert config.attention_parameters == 29_360_128
    assert config.recurrent_parameters == 51_681_280
    assert config.matrix_parameters == 5_497_569_280
    # the printed count cannot be a sum of the printed dimensions: all are multiples of 7
    assert config.matrix_parameters % 7 == 0 and 4_960_153_600 % 7 != 0


def test_a_convolution_adds_its_taps_and_nothing_else():
    plain = ModelConfig()
    for width in (2, 3, 4):
        convolved = replace(plain, conv_width=width)
        taps = 24 * width * 3 * 28 * 128
        assert convolved.vector_parameters - plain.vector_parameters == taps
        assert convolved.total_parameters - plain.total_parameters == taps
        assert convolved.matrix_parameters == plain.matrix_parameters
        assert convolved.forward_flops_per_token(64) - plain.forward_flops_per_token(64) == 2 * taps


def test_layer_typing_is_three_to_one():
    config = ModelConfig()
    attention = [i for i in range(config.layers) if config.is_attention(i)]
    assert attention == [3, 7, 11, 15, 19, 23, 27, 31]


def test_r16_state_and_cache_bytes():
    config = ModelConfig()
    assert config.state_bytes() == 24 * 28 * 128 * 128 * 4 == 44_040_192
    # and three tokens of q, k and v, 16 bit
    convolved = replace(config, conv_width=4)
    assert convolved.state_bytes(2, width=2) == 2 * (44_040_192 + 24 * 3 * 10_752 * 2)
    # 67.1 MB and 8.59 GB of codes; one float32 scale a token and head on top
    assert config.cache_bytes(8) == 67_108_864 * 132 // 128
    assert 8.59e9 < config.cache_bytes(8, config.max_context_len) < 8.9e9
    assert config.cache_bytes(16, 8192) == 2 * 67_108_864


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(layers=30), "multiple of 4"),
        (dict(recurrent_layers=23), "24 and 8"),
        (dict(num_kv_heads=3), "28 and 3"),
        (dict(hypersphere_radius=60.0), "59.866"),
        (dict(head_dim=100), "got 100"),
        (dict(anchor_tokens=9000), "9000"),
        (dict(vocab_size=0), "vocab_size"),
        (dict(conv_width=1), r"conv_width must be 0 \(none\), 2, 3 or 4, got 1"),
        (dict(conv_width=5), "got 5"),
    ],
)
def test_impossible_shapes_are_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**change)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_round_trip_and_hold_the_spectral_step(name):
    config = preset(name)
    assert config_from_dict(asdict(config)) == config
    # R8: eta_base * 256 / hidden_dim = 0.06 in every preset
    assert config.optimizer.matrix_lr_base * 256 / config.model.hidden_dim == pytest.approx(0.06)


@pytest.mark.parametrize("name, value, rule", [("matrix_lr_base", 0.1, "spectral"), ("spectral_lr", 0.1, "printed"),
                                               ("attention_output_rule", "width", "spectral")])  # fmt: skip
def test_a_rate_that_the_rule_does_not_read_is_refused(name, value, rule):
    other = {"printed": "spectral", "spectral": "printed"}[rule]
    with pytest.raises(ValueError, match=f"{name} is read under lr_rule {other} only, got lr_rule {rule}"):
        preset("nano").with_values({name: value, "lr_rule": rule})
    assert getattr(preset("nano").with_values({name: value, "lr_rule": other}).optimizer, name) == value


def test_unknown_settings_suggest_the_nearest():
    with pytest.raises(ValueError, match="did you mean total_tokens"):
        preset("nano").with_values({"total_token": 1})
    with pytest.raises(ValueError, match=r"model\.layer.*did you mean layers"):
        config_from_dict({"model": {"layer": 4}})
    with pytest.raises(ValueError, match="did you mean nano"):
        preset("nanoo")


def test_flop_count_against_the_sum_over_matrices():
    config = replace(ModelConfig(), vocab_size=1000)
    short = config.forward_flops_per_token(2)
    assert short > 2 * config.matrix_parameters
    # window attention saturates: from 64 k to 1 M only the anchors' share grows
    assert config.forward_flops_per_token(1 << 20) < 1.03 * config.forward_flops_per_token(1 << 16)


def test_field_names_are_unique_over_sections():
    names = [f.name for section in fields(Config) for f in fields(section.default_factory)]
    assert len(names) == len(set(names))


def test_every_setting_is_read_somewhere():
    reads: set[str] = set()
    for path in ROOT.glob("*.py"):
        tree = ast.parse(path.read_text())
        if path.name == "model_config.py":
            # validation alone keeps no field alive, accounting and derived values do
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
                    node.body = []
        reads |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    leaves = {f.name for section in fields(Config) for f in fields(section.default_factory)}
    assert all(is_dataclass(section.default_factory) for section in fields(Config))
    # stored because the specification lists them and validated: the radius against sqrt(hidden_dim), which the kernels
    # use, the plateau against the two other phases
    assert leaves - reads == {"hypersphere_radius", "stable_fraction"}


def test_root_holds_exactly_the_eleven_files():
    assert {p.stem for p in ROOT.glob("*.py")} == set(LEVELS)


@pytest.mark.parametrize("module", LEVELS)
def test_imports_point_one_way(module):
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name not in LEVELS or LEVELS[name] < LEVELS[module], f"{module} imports {name}"


def test_importing_everything_has_no_effect_and_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        f"import {', '.join(LEVELS)}\n"
        "import torch, logging\n"
        "assert not torch.cuda.is_initialized() and not logging.getLogger().handlers\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "" and done.stderr == "", done.stderr
