#!/usr/bin/env python3
"""Make a random-weight target and draft model of a real model's shape, to measure speed without its weights.

    python3 make_shape.py SHAPE OUT        (needs: torch, safetensors, tokenizers)

SHAPE is llama3.1-8b, qwen3-8b, qwen3-4b or the path of a config.json. OUT/target and OUT/draft are Hugging Face folders
in bf16; the draft model has five layers and blocks of 16. The tokenizer's tokens stand for nothing.
"""
import json
import pathlib
import sys

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES = {
    "llama3.1-8b": dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336,
                        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                        vocab_size=128256, rope_theta=500000.0),
    "qwen3-8b": dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=4096, intermediate_size=12288,
                     num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                     vocab_size=151936, rope_theta=1000000.0),
    "qwen3-4b": dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=2560, intermediate_size=9728,
                     num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                     vocab_size=151936, rope_theta=1000000.0),
}
COMMON = dict(hidden_act="silu", max_position_embeddings=40960, rms_norm_eps=1e-6, rope_scaling=None,
              tie_word_embeddings=False, attention_bias=False, mlp_bias=False, use_sliding_window=False,
              sliding_window=None, max_window_layers=36, torch_dtype="bfloat16", use_cache=True)
DRAFT_LAYERS, BLOCK, MASK = 5, 16, 5


class Writer:
    """Shards of a few GB, with an index."""

    def __init__(self, folder):
        self.folder, self.part, self.bytes, self.map, self.number = folder, {}, 0, {}, 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name, *shape, ones=False):
        tensor = (torch.ones(shape, device=DEVICE) if ones else torch.randn(shape, device=DEVICE) * 0.02)
        self.part[name] = tensor.to(torch.bfloat16).cpu()
        self.bytes += self.part[name].nbytes
        if self.bytes > 4 << 30:
            self.flush()

    def flush(self):
        if not self.part:
            return
        file = f"model-{self.number:05}.safetensors"
        save_file(self.part, self.folder / file)
        self.map.update({name: file for name in self.part})
        self.part, self.bytes, self.number = {}, 0, self.number + 1

    def close(self):
        """Names as the hub has them: engines look for those."""
        self.flush()
        names = {f"model-{i:05}.safetensors": f"model-{i + 1:05}-of-{self.number:05}.safetensors"
                 for i in range(self.number)}
        if self.number == 1:
            names = {"model-00000.safetensors": "model.safetensors"}
        for old, new in names.items():
            (self.folder / old).rename(self.folder / new)
        if self.number > 1:
            index = {"metadata": {}, "weight_map": {k: names[v] for k, v in self.map.items()}}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))


def layer(w, prefix, c, qk_norm):
    h, i, hd = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
    for name, shape in [("q_proj", (q, h)), ("k_proj", (kv, h)), ("v_proj", (kv, h)), ("o_proj", (h, q))]:
        w.add(f"{prefix}self_attn.{name}.weight", *shape)
    for name, shape in [("gate_proj", (i, h)), ("up_proj", (i, h)), ("down_proj", (h, i))]:
        w.add(f"{prefix}mlp.{name}.weight", *shape)
    for name in ["input_layernorm", "post_attention_layernorm"]:
        w.add(f"{prefix}{name}.weight", h, ones=True)
    if qk_norm:
        for name in ["q_norm", "k_norm"]:
            w.add(f"{prefix}self_attn.{name}.weight", hd, ones=True)


def tokenizer(folder, vocab):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", "<pad>", "<unk>", "<user>", "<mask>"] + alphabet
    names += [f"t{i}" for i in range(vocab - len(names))]
    tok = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<s>", "eos_token": "</s>", "model_max_length": 40960,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}))


def main(shape, out):
    c = dict(COMMON)
    c.update(SHAPES[shape] if shape in SHAPES else json.loads(pathlib.Path(shape).read_text()))
    c.update(bos_token_id=0, eos_token_id=1)
    target, draft = pathlib.Path(out, "target"), pathlib.Path(out, "draft")
    w = Writer(target)
    w.add("model.embed_tokens.weight", c["vocab_size"], c["hidden_size"])
    w.add("lm_head.weight", c["vocab_size"], c["hidden_size"])
    w.add("model.norm.weight", c["hidden_size"], ones=True)
    for i in range(c["num_hidden_layers"]):
        layer(w, f"model.layers.{i}.", c, c["model_type"].startswith("qwen3"))
    w.close()
    (target / "config.json").write_text(json.dumps(c, indent=1))
    tokenizer(target, c["vocab_size"])
    n = c["num_hidden_layers"]
    ids = [round(1 + i * (n - 4) / (DRAFT_LAYERS - 1)) for i in range(DRAFT_LAYERS)]
    d = dict(c, architectures=["DFlashDraftModel"], model_type="qwen3", num_hidden_layers=DRAFT_LAYERS,
             num_target_layers=n, block_size=BLOCK, layer_types=["full_attention"] * DRAFT_LAYERS,
             dflash_config={"mask_token_id": MASK, "target_layer_ids": ids})
    w = Writer(draft)
    w.add("fc.weight", d["hidden_size"], len(ids) * d["hidden_size"])
    for name in ["hidden_norm", "norm"]:
        w.add(f"{name}.weight", d["hidden_size"], ones=True)
    for i in range(DRAFT_LAYERS):
        layer(w, f"layers.{i}.", d, True)
    w.close()
    (draft / "config.json").write_text(json.dumps(d, indent=1))


if __name__ == "__main__":
    torch.manual_seed(0)
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    main(*sys.argv[1:])
