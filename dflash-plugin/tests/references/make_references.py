#!/usr/bin/env python3
"""Draft model checkpoints and reference outputs, by the classes and loops that the trainers publish.

    python3 make_references.py --dflash A --specforge B --speculators C --deepspec D --out ../fixtures/public

Each argument is a checkout: z-lab/dflash, sgl-project/SpecForge, vllm-project/speculators, deepseek-ai/DeepSpec. Needs
torch (its CPU build is enough), transformers (see ../fixtures/public/README.md), safetensors, and what the checkouts
import (openai, loguru, datasets, pydantic, pydantic-settings). Nothing of the checkouts is copied: their model classes,
config builders, exporters and decoding loops are imported and run, in f32 with eager attention, on the models of
tiny.py. Folders in OUT are deleted and made anew.
"""
import argparse
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from tiny import MASK, SIZES, TAPS, TARGET_LAYERS, VOCAB, fill, make_target, record, save

DRAFT = dict(
    SIZES, architectures=["DFlashDraftModel"], num_hidden_layers=2, num_target_layers=TARGET_LAYERS, block_size=8,
    attention_bias=False, dflash_config=dict(mask_token_id=MASK, target_layer_ids=TAPS),
)
LENGTH, ANCHORS = 26, [5, 9, 16]  # of the training passes


def write(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def eager(config):
    config._attn_implementation = "eager"
    return config


def only_weights_and_config(folder):
    for file in folder.iterdir():
        if file.name != "config.json" and not file.name.startswith("model"):
            file.unlink()


# z-lab: one class, one loop. Keys of the config differ, and weights where shapes do.


def zlab(out, target, weights):
    from dflash.model import DFlashDraftModel, build_target_layer_ids, dflash_generate

    ids = {n: {k: build_target_layer_ids(n, k) for k in (1, 2, 3, 5, 6, 8)} for n in range(12, 97)}
    (out / "layer_ids.json").write_text(json.dumps(ids, separators=(",", ":")) + "\n")

    v4 = lambda theta, scaling: dict(rope_theta=theta, rope_scaling=scaling)
    v5 = lambda **parameters: dict(rope_parameters=parameters)
    yarn = dict(rope_type="yarn", original_max_position_embeddings=16)
    with_ids = lambda ids: dict(dflash_config=dict(mask_token_id=MASK, target_layer_ids=ids))
    dialects = {
        "zlab_block16": dict(block_size=16, **v4(1e6, None)),
        "zlab_descending_taps": dict(**with_ids([9, 2, 5]), **v5(rope_type="default", rope_theta=1e6)),
        "zlab_linear": dict(block_size=7, **v4(10000.0, {"type": "linear", "factor": 4.0})),
        "zlab_llama3": dict(block_size=10, **v4(10000.0, dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32))),
        "zlab_yarn": v4(10000.0, dict(yarn, factor=32.0)),
        "zlab_yarn_mscale": v5(rope_theta=50000.0, mscale=1.0, mscale_all_dim=0.4, factor=64.0, **yarn),
        "zlab_default_ids": dict(
            num_hidden_layers=3, intermediate_size=16, dflash_config=dict(mask_token_id=MASK), **v4(1e6, None)),
        "zlab_bias_yarn": dict(attention_bias=True, **v4(150000.0, dict(
            rope_type="yarn", factor=32.0, original_max_position_embeddings=512, truncate=False, beta_fast=32.0,
            beta_slow=1.0))),
        "zlab_eight_taps": dict(
            num_hidden_layers=6, intermediate_size=16, head_dim=8, **with_ids([0, 1, 3, 4, 6, 7, 9, 10]),
            **v4(1e6, None)),
    }
    bf16, f16 = torch.bfloat16, torch.float16
    own_weights = {"zlab_default_ids": bf16, "zlab_bias_yarn": f16, "zlab_eight_taps": bf16}
    for name, keys in dialects.items():
        print(name)
        folder = out / name
        write(folder, DRAFT | keys)
        config = eager(Qwen3Config.from_json_file(folder / "config.json"))
        if name in own_weights:
            model = fill(DFlashDraftModel(config), len(name)).to(own_weights[name])
            sharded = dict(max_shard_size="40KB") if name == "zlab_eight_taps" else {}
            text = (folder / "config.json").read_text()
            model.save_pretrained(folder, **sharded)
            (folder / "config.json").write_text(text)
            only_weights_and_config(folder)
            model = DFlashDraftModel.from_pretrained(folder, config=config, dtype=torch.float32)
        else:
            model = DFlashDraftModel(config)
            model.load_state_dict(load_file(weights))
        model = model.float().eval()

        def loop(prompt):
            dflash_generate(model, target, prompt, max_new_tokens=90, stop_token_ids=None, temperature=0.0)

        ends = target.model.embed_tokens, target.lm_head
        save(folder / "io.safetensors", record(loop, target, model, "forward", *ends, model.target_layer_ids))


# SpecForge: its export and loop, and its training pass for windows.


def specforge(out, target, weights):
    from specforge.export.to_hf import export_to_hf
    from specforge.modeling.auto import AutoDraftModel

    print("specforge_export")
    folder = out / "specforge_export"
    with tempfile.TemporaryDirectory() as temporary:
        rope = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, rope_theta=1e6)
        source = DRAFT | dict(auto_map={"AutoModel": "dflash.DFlashDraftModel"}, rope_parameters=rope)
        write(Path(temporary), source)
        state = Path(temporary) / "training_state.pt"
        torch.save(dict(strategy="dflash", draft_state_dict=load_file(weights)), state)
        export_to_hf(str(state), str(Path(temporary) / "config.json"), str(folder))
    only_weights_and_config(folder)
    model = AutoDraftModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def loop(prompt):
        model.spec_generate(target, prompt, max_new_tokens=90, stop_token_ids=None, temperature=0.0)

    ends = target.model.embed_tokens, target.lm_head
    save(folder / "io.safetensors", record(loop, target, model, "forward", *ends, model.target_layer_ids))
    exported, trained = load_file(folder / "model.safetensors"), load_file(weights)
    assert exported.keys() == trained.keys() and all(exported[name].equal(trained[name]) for name in trained)
    (folder / "model.safetensors").unlink()  # It is shared/draft.safetensors.

    for name, layers, window in [
        ("specforge_mixed_sliding", ["sliding_attention", "full_attention"], 10),
        ("specforge_all_sliding", ["sliding_attention", "sliding_attention"], 8),
    ]:
        print(name)
        folder = out / name
        keys = dict(layer_types=layers, sliding_window=window, use_sliding_window=True, rope_theta=10000.0)
        write(folder, DRAFT | keys)
        save(folder / "io.safetensors", specforge_training_pass(folder, target, weights))


def specforge_training_pass(folder, target, weights):
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    model = DFlashDraftModel(eager(Qwen3Config.from_json_file(folder / "config.json")))
    model.load_state_dict(load_file(weights))
    online = OnlineDFlashModel(
        model.eval(), target.lm_head, target.model.embed_tokens, MASK, DRAFT["block_size"], attention_backend="sdpa",
        num_anchors=len(ANCHORS))
    ids, taps, supervised = training_inputs(len(TAPS))
    for anchor in ANCHORS:  # An anchor's successor must be supervised, too.
        supervised[:, anchor + 1] = 1
    with torch.inference_mode():
        anchors, kept, hidden = online._forward_draft_blocks(ids, taps, supervised)
        logits = target.lm_head(hidden)[0]
    assert anchors[0].tolist() == ANCHORS and kept.all(), "other anchors than those supervised"
    return training_outputs(ids, taps, hidden, logits.argmax(-1), DRAFT["block_size"])


def training_inputs(taps):
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, MASK, (1, LENGTH), generator=generator)
    features = torch.randn(1, LENGTH, taps * SIZES["hidden_size"], generator=generator)
    supervised = torch.zeros(1, LENGTH)
    supervised[:, ANCHORS] = 1
    return ids, features, supervised


def training_outputs(ids, taps, hidden, drafts, block):
    shape = (len(ANCHORS), block)
    return dict(
        ids=ids[0], taps=taps[0], anchors=torch.tensor(ANCHORS), drafts=drafts.reshape(shape),
        hidden=hidden.reshape(*shape, -1))


# speculators: its converter, and what its training builds, saves and computes.


def speculators(out, target):
    from speculators.convert.dflash.converter import DFlashConverter

    target.save_pretrained("target")
    print("speculators_converted")
    source = json.loads((out / "zlab_llama3" / "config.json").read_text())
    # The config alone: the weights are copies of z-lab's and of the target's.
    converted = DFlashConverter()._build_config(source, "target", None)
    converted.save_pretrained(out / "speculators_converted")
    only_weights_and_config(out / "speculators_converted")

    sliding, full = "sliding_attention", "full_attention"
    speculators_export(out / "speculators_reduced_vocabulary", [sliding, full], draft_vocab_size=96, block_size=8)
    speculators_export(
        out / "speculators_from_anchor", [sliding, sliding], draft_vocab_size=VOCAB, block_size=7,
        sample_from_anchor=True, sliding_window_non_causal=True)


def speculators_export(folder, layer_types, **arguments):
    from speculators.models.dflash import DFlashDraftModel
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    print(folder.name)
    layers = Qwen3Config(
        **SIZES, num_hidden_layers=2, layer_types=layer_types, sliding_window=6, use_sliding_window=True,
        rope_theta=1e6)
    size = arguments["draft_vocab_size"]
    counts = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3)).tolist()
    d2t, t2d = build_vocab_mappings_from_distribution(dict(enumerate(counts)), size, VOCAB)
    model = DFlashDraftModel.from_training_args(
        layers, t2d=t2d, d2t=d2t, verifier_name_or_path="target", mask_token_id=MASK, draft_attn_impl="eager",
        target_layer_ids=[tap + 1 for tap in TAPS], **arguments)
    ends = {name: weight.clone() for name, weight in model.state_dict().items() if not is_body(name)}
    fill(model, len(folder.name)).load_state_dict(ends, strict=False)
    model.bfloat16().save_pretrained(folder)
    only_weights_and_config(folder)

    config = DFlashDraftModel.config_class.from_pretrained(folder)
    eager(config.transformer_layer_config)
    model = DFlashDraftModel.from_pretrained(folder, config=config, dtype=torch.float32).float().eval()
    ids, taps, supervised = training_inputs(len(TAPS))
    # Distinct at every position, so that a label says where it comes from.
    last = torch.randn(1, LENGTH, SIZES["hidden_size"], generator=torch.Generator().manual_seed(11))
    with torch.inference_mode():
        hidden, logits, labels, counted, _ = model._backbone_forward(
            taps, ids, supervised, last, torch.zeros(1, LENGTH, dtype=torch.long), max_anchors=len(ANCHORS))
        by_position = model.verifier_lm_head(model.verifier_norm(last))[0]
    distance = (labels[0][:, None] - by_position[None]).abs().amax(-1)
    assert (distance.amin(-1) < 1e-4).all(), "labels that are no position's"
    drafts = logits[0].argmax(-1)
    if model.d2t is not None:
        drafts = drafts + model.d2t[drafts]
    block = model.block_size
    found = training_outputs(ids, taps, hidden, drafts, block)
    # The position after the target's row is the one of the token that the row chose.
    found["predicted_position"] = (distance.argmin(-1) + 1).reshape(len(ANCHORS), block)
    save(folder / "io.safetensors", found)


def is_body(name):
    return name.startswith(("layers.", "fc.", "hidden_norm.", "norm."))


# DeepSpec: its config builder, class and evaluation loop.


def deepspec(out, target):
    from deepspec.eval.base_evaluator import generate_decoding_sample
    from deepspec.eval.dspark.evaluator import Qwen3DSparkEvaluator
    from deepspec.modeling.dspark.qwen3.config import build_draft_config
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel
    from deepspec.utils.config import to_config_node

    print("deepspec_export")
    folder = out / "deepspec_export"
    # The published recipe's values, with sizes of this target.
    arguments = to_config_node(dict(
        block_size=7, num_draft_layers=2, target_layer_ids=TAPS, mask_token_id=MASK, num_anchors=512, markov_rank=0,
        confidence_head_alpha=0.0))
    model = fill(Qwen3DSparkModel(build_draft_config(target.config, arguments)), 5)
    model.initialize_embeddings_and_head(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    model.bfloat16().save_pretrained(folder)
    only_weights_and_config(folder)
    model = Qwen3DSparkModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    evaluator = Qwen3DSparkEvaluator.__new__(Qwen3DSparkEvaluator)  # Without its process group and real models.
    evaluator.draft_model, evaluator.target_model = model, target
    evaluator.confidence_head_recorder = None
    evaluator.args = SimpleNamespace(temperature=0.0, confidence_threshold=0.0, max_new_tokens=40)

    def loop(prompt):
        evaluator.generate_one_sample(input_ids=prompt, stop_token_ids=None)

    found = record(loop, target, model, "_forward_backbone", model.embed_tokens, model.lm_head, TAPS)
    save(folder / "io.safetensors", found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("dflash", "specforge", "speculators", "deepspec", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    checkouts = [arguments.dflash, arguments.specforge, arguments.deepspec, arguments.speculators / "src",
                 arguments.speculators / "hs_connectors" / "src"]
    sys.path[:0] = [str(path.resolve()) for path in checkouts]
    # speculators asks for its own version, which a checkout that is not installed has not.
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "checkout" if name == "speculators" else version(name)
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_grad_enabled(False)
    out = arguments.out.resolve()
    for folder in out.iterdir() if out.exists() else []:
        if folder.is_dir():
            shutil.rmtree(folder)
    (out / "shared").mkdir(parents=True)

    target = make_target()
    bf16 = lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save(out / "shared" / "target.safetensors", bf16(
        {"embed_tokens.weight": target.model.embed_tokens.weight, "lm_head.weight": target.lm_head.weight}))
    weights = out / "shared" / "draft.safetensors"
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)  # What is saved names the target by its path.
        from dflash.model import DFlashDraftModel

        config = eager(Qwen3Config(**DRAFT))
        save(weights, bf16(fill(DFlashDraftModel(config), 2).state_dict()))
        zlab(out, target, weights)
        specforge(out, target, weights)
        speculators(out, target)
        deepspec(out, target)
        os.chdir(out)


if __name__ == "__main__":
    main()
