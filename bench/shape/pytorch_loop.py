#!/usr/bin/env python3
"""The peer of `dflash-bench shape`: the DFlash loop in PyTorch with the same weights, one step after another.

    python3 pytorch_loop.py FOLDER [--context 1024] [--batch 1,4,8,16,32] [--json FILE]
    (needs: torch, transformers, safetensors, a GPU)

FOLDER is what make_shape.py wrote. Target: transformers, sdpa, bf16, eager, with a dynamic KV cache and all hidden
states, as the public DFlash code runs it; plain decoding also with a static cache and torch.compile (CUDA graphs),
where that works. Draft model: the published layer, written out. The sequences of a batch have one length, and every step
accepts as many drafts, so no row is ever padded: both make it faster than a server could be.
Times are medians in ms over steps, device waited for.
"""
import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

DEVICE, DTYPE = "cuda", torch.bfloat16


class Draft:
    """Five layers over the target's features; K/V of the context is kept, that of the block is not."""

    def __init__(self, folder):
        self.c = json.loads((folder / "config.json").read_text())
        self.w = {k: v.to(DEVICE, DTYPE) for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}
        self.layers = self.c["num_hidden_layers"]
        inv = 1.0 / self.c["rope_theta"] ** (torch.arange(0, self.c["head_dim"], 2, device=DEVICE) / self.c["head_dim"])
        angles = torch.outer(torch.arange(self.c["max_position_embeddings"], device=DEVICE).float(), inv)
        angles = torch.cat([angles, angles], -1)
        self.cos, self.sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)

    def norm(self, x, name):
        return F.rms_norm(x, (x.shape[-1],), self.w[name + ".weight"], self.c["rms_norm_eps"])

    def heads(self, x, name, norm=None, at=None):
        x = F.linear(x, self.w[name + ".weight"]).unflatten(-1, (-1, self.c["head_dim"]))
        x = (self.norm(x, norm) if norm else x).transpose(1, 2)
        if at is None:
            return x
        cos, sin = self.cos[at], self.sin[at]
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def features(self, taps):
        return self.norm(F.linear(torch.cat(taps, -1), self.w["fc.weight"]), "hidden_norm")

    def context(self, taps, at):
        """K/V of rows that the target has processed, one pair a layer."""
        x = self.features(taps)
        return [(self.heads(x, f"layers.{i}.self_attn.k_proj", f"layers.{i}.self_attn.k_norm", at),
                 self.heads(x, f"layers.{i}.self_attn.v_proj")) for i in range(self.layers)]

    def forward(self, x, kv, at):
        for i in range(self.layers):
            p = f"layers.{i}."
            y = self.norm(x, p + "input_layernorm")
            q = self.heads(y, p + "self_attn.q_proj", p + "self_attn.q_norm", at)
            k = torch.cat([kv[i][0], self.heads(y, p + "self_attn.k_proj", p + "self_attn.k_norm", at)], 2)
            v = torch.cat([kv[i][1], self.heads(y, p + "self_attn.v_proj")], 2)
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
            x = x + F.linear(y, self.w[p + "self_attn.o_proj.weight"])
            y = self.norm(x, p + "post_attention_layernorm")
            y = F.silu(F.linear(y, self.w[p + "mlp.gate_proj.weight"])) * F.linear(y, self.w[p + "mlp.up_proj.weight"])
            x = x + F.linear(y, self.w[p + "mlp.down_proj.weight"])
        return self.norm(x, "norm")


def timed(parts, name, f):
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = f()
    torch.cuda.synchronize()
    parts.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
    return result


def loop(target, draft, batch, context, steps, accepted):
    c, d = target.config, draft.c
    block, ids = d["block_size"], d["dflash_config"]["target_layer_ids"]
    tokens = torch.randint(6, c.vocab_size, (batch, context), device=DEVICE)
    cache = DynamicCache()
    parts = {}

    def run(rows, base):
        # Only the rows' own logits of a prompt's end are needed.
        out = target.model(input_ids=rows, past_key_values=cache, use_cache=True, output_hidden_states=True,
                           cache_position=torch.arange(base, base + rows.shape[1], device=DEVICE))
        taps = [out.hidden_states[i + 1] for i in ids]
        return target.lm_head(out.last_hidden_state[:, -block:]), taps

    logits, taps = run(tokens, 0)
    kv = draft.context(taps, torch.arange(context, device=DEVICE))
    anchor, n = logits[:, -1:].argmax(-1), context
    for _ in range(steps):
        timed(parts, "plain", lambda: run(anchor, n)[0].argmax(-1).tolist())
        cache.crop(n)
        at = torch.arange(n, n + block, device=DEVICE)

        def make():
            masks = torch.full((batch, block - 1), d["dflash_config"]["mask_token_id"], device=DEVICE)
            x = target.model.embed_tokens(torch.cat([anchor, masks], 1))
            drafts = target.lm_head(draft.forward(x, kv, at)[:, 1:]).argmax(-1)
            return torch.cat([anchor, drafts], 1)

        def whole():
            rows = make()
            logits, taps = run(rows, n)
            best = logits.argmax(-1)
            (rows[:, 1:] == best[:, :-1]).cumprod(1).sum(1).tolist()  # Accept lengths, to the host.
            keep = accepted + 1
            cache.crop(n + keep)
            new = draft.context([t[:, :keep] for t in taps], at[:keep])
            return best[:, accepted : accepted + 1], [(torch.cat([a, b], 2), torch.cat([v, w], 2))
                                                      for (a, v), (b, w) in zip(kv, new)]

        rows = timed(parts, "draft", make)
        timed(parts, "verify", lambda: run(rows, n))
        cache.crop(n)
        anchor, kv = timed(parts, "step", whole)
        n += accepted + 1
    return {name: statistics.median(times[2:]) for name, times in parts.items()}


def compiled_plain(target, context, steps):
    """Plain decoding of one sequence with a static cache and CUDA graphs."""
    cache = StaticCache(config=target.config, max_cache_len=context + 64)
    step = torch.compile(lambda ids, at: target(input_ids=ids, past_key_values=cache, cache_position=at).logits,
                         mode="reduce-overhead", fullgraph=False)
    ids = torch.randint(6, target.config.vocab_size, (1, context), device=DEVICE)
    target(input_ids=ids, past_key_values=cache, cache_position=torch.arange(context, device=DEVICE))
    parts = {}
    for i in range(steps):
        at = torch.tensor([context + i % 32], device=DEVICE)
        timed(parts, "plain", lambda: step(ids[:, -1:], at))
    return statistics.median(parts["plain"][8:])


@torch.inference_mode()
def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("folder", type=Path)
    args.add_argument("--context", type=int, default=1024)
    args.add_argument("--batch", default="1,4,8,16,32")
    args.add_argument("--steps", type=int, default=12)
    args.add_argument("--accepted", type=int, default=5, help="drafts accepted a step; tau is one more")
    args.add_argument("--compile", action="store_true", help="also plain decoding with torch.compile")
    args.add_argument("--json", type=Path)
    args = args.parse_args()
    target = AutoModelForCausalLM.from_pretrained(args.folder / "target", dtype=DTYPE, attn_implementation="sdpa")
    target = target.to(DEVICE).eval()
    draft = Draft(args.folder / "draft")
    rows = []
    for batch in map(int, args.batch.split(",")):
        ms = loop(target, draft, batch, args.context, args.steps, args.accepted)
        tau = args.accepted + 1
        rows.append(dict(batch=batch, context=args.context, tau=tau, ms=ms, plain_tok_s=batch / ms["plain"] * 1e3,
                         dflash_tok_s=batch * tau / ms["step"] * 1e3))
        print(f"batch {batch:3}  plain {ms['plain']:7.2f}  draft {ms['draft']:6.2f}  verify {ms['verify']:7.2f}  "
              f"step {ms['step']:7.2f} ms  {rows[-1]['plain_tok_s']:6.0f} and {rows[-1]['dflash_tok_s']:6.0f} tok/s", flush=True)
    report = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, rows=rows)
    if args.compile:
        try:
            report["compiled_plain_ms"] = compiled_plain(target, args.context, 40)
            print(f"plain, compiled: {report['compiled_plain_ms']:.2f} ms")
        except Exception as error:  # Whatever a compiler can fail with; the other figures stand.
            print(f"plain, compiled: failed: {type(error).__name__}: {str(error)[:200]}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
