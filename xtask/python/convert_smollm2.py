#!/usr/bin/env python3
"""Build a Hugging Face folder for SmolLM2-135M-Instruct from its GGUF.

    python3 convert_smollm2.py MODEL.gguf OUT       (needs: gguf, numpy)

`cargo xtask model` calls it; xtask/src/model.rs says where the GGUF comes from, and holds the SHA-256 of every file.
OUT receives config.json, generation_config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json and
special_tokens_map.json. The same input gives the same bytes. The weights are the *dequantized Q4_1* ones (embedding:
Q8_0), so they differ slightly from HuggingFaceTB/SmolLM2-135M-Instruct.
"""
import json
import os
import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


def to_bf16_bytes(x):
    """float32 -> bfloat16, round to nearest even, little-endian bytes."""
    u = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    u = u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))
    return (u >> np.uint32(16)).astype("<u2").tobytes()


def unpermute(w, n_head):
    """Undo llama.cpp's row order (interleaved RoPE pairs) -> HF rotate-half order."""
    rows, cols = w.shape
    return w.reshape(n_head, rows // n_head // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def write_safetensors(path, tensors):
    """Tensors sorted by name; written by hand so that the bytes depend on no library version."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        shape, data = tensors[name]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        for name in sorted(tensors):
            f.write(tensors[name][1])


def write_json(path, obj):
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        json.dump(obj, f, indent=2, ensure_ascii=False)
        f.write("\n")


def convert(r, out):
    def kv(key):
        return r.fields[key].contents()

    assert kv("general.architecture") == "llama"
    heads, kv_heads = kv("llama.attention.head_count"), kv("llama.attention.head_count_kv")
    bos, eos = kv("tokenizer.ggml.bos_token_id"), kv("tokenizer.ggml.eos_token_id")
    unk, pad = kv("tokenizer.ggml.unknown_token_id"), kv("tokenizer.ggml.padding_token_id")

    # --- weights -----------------------------------------------------------
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }
    tensors = {}
    for t in r.tensors:
        w = dequantize(t.data, t.tensor_type).astype(np.float32)
        w = w.reshape([int(n) for n in reversed(t.shape)])
        part = t.name.split(".")
        if part[0] == "blk":
            if part[2] == "attn_q":
                w = unpermute(w, heads)
            elif part[2] == "attn_k":
                w = unpermute(w, kv_heads)
            name = f"model.layers.{part[1]}.{names[part[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part[0]]
        tensors[name] = (list(w.shape), to_bf16_bytes(w))
    write_safetensors(os.path.join(out, "model.safetensors"), tensors)

    # --- configs -----------------------------------------------------------
    write_json(os.path.join(out, "config.json"), {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "head_dim": kv("llama.embedding_length") // heads,
        "hidden_act": "silu",
        "hidden_size": kv("llama.embedding_length"),
        "initializer_range": 0.041666666666666664,
        "intermediate_size": kv("llama.feed_forward_length"),
        "max_position_embeddings": kv("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": kv("llama.block_count"),
        "num_key_value_heads": kv_heads,
        "pad_token_id": pad,
        "rms_norm_eps": float(f"{kv('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_scaling": None,
        "rope_theta": kv("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": kv("llama.vocab_size"),
    })
    write_json(os.path.join(out, "generation_config.json"), {
        "_from_model_config": True, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad,
    })

    # --- tokenizer: GPT-2 byte-level BPE, digits split one by one ("smollm") ---
    assert kv("tokenizer.ggml.model") == "gpt2" and kv("tokenizer.ggml.pre") == "smollm"
    tokens, types = kv("tokenizer.ggml.tokens"), kv("tokenizer.ggml.token_type")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write_json(os.path.join(out, "tokenizer.json"), {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for i, t in enumerate(tokens) if types[i] == 3
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": kv("tokenizer.ggml.merges"),
        },
    })
    special = {"bos_token": tokens[bos], "eos_token": tokens[eos], "pad_token": tokens[pad],
               "unk_token": tokens[unk], "additional_special_tokens": [tokens[bos], tokens[eos]]}
    write_json(os.path.join(out, "special_tokens_map.json"), special)
    write_json(os.path.join(out, "tokenizer_config.json"), {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False,
                     "single_word": False, "special": True}
            for i, t in enumerate(tokens) if types[i] == 3
        },
        **special,
        "chat_template": kv("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": kv("llama.context_length"),
        "tokenizer_class": "GPT2Tokenizer",
        "vocab_size": kv("llama.vocab_size"),
    })


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: convert_smollm2.py MODEL.gguf OUT")
    os.makedirs(sys.argv[2], exist_ok=True)
    convert(GGUFReader(sys.argv[1]), sys.argv[2])
