"""Tiny random models, and a record of what goes through them while somebody else's loop runs."""
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB, MASK, TARGET_LAYERS, TAPS = 256, 255, 12, [2, 5, 9]
# Query heads are together wider than the model, so that `head_dim` is read and not derived.
SIZES = dict(
    model_type="qwen3", hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=VOCAB, max_position_embeddings=512, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False,
)


def fill(model, seed):
    """Random weights of a size at which every part matters, rounded to bf16."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            noise = noise * 1.5 / weight.shape[-1] ** 0.5
        elif name.endswith("norm.weight"):
            noise = 1 + 0.2 * noise
        weight.data = noise.bfloat16().float()
    return model.eval()


def make_target():
    """The target. A few tokens win more often, so that random drafts are accepted now and then."""
    config = Qwen3Config(**SIZES, num_hidden_layers=TARGET_LAYERS, rope_theta=10000.0, attn_implementation="eager")
    target = fill(Qwen3ForCausalLM(config), 1)
    target.lm_head.weight.data[8:] *= 0.5
    return target


def prompt(seed, length=20):
    return torch.randint(0, MASK, (1, length), generator=torch.Generator().manual_seed(seed))


def save(path, tensors):
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, path)


class Done(Exception):
    """Enough has been recorded."""


class Recorder:
    """Keeps what the passes of target and draft model took and gave.

    `ends` has the `embed_tokens` and `lm_head` that the draft model is run with, `method` is the name of the draft
    model's forward.
    """

    def __init__(self, target, draft, method, embed_tokens, lm_head, steps):
        self.in_target, self.outputs, self.passes, self.steps, self.block = False, {}, [], [], None
        self.hooks = [
            target.register_forward_pre_hook(lambda *_: self.enter()),
            target.register_forward_hook(lambda _module, _inputs, output: self.leave(output)),
            embed_tokens.register_forward_pre_hook(lambda _module, inputs: self.embedded(inputs[0])),
            lm_head.register_forward_hook(lambda _module, _inputs, output: self.drafted(output)),
        ]
        for k, layer in enumerate(target.model.layers):
            self.hooks.append(layer.register_forward_hook(lambda _module, _inputs, output, k=k: self.layer(k, output)))
        self.draft, self.method, original = draft, method, getattr(draft, method)

        def forward(**inputs):
            if len(self.steps) > steps:
                raise Done
            hidden = original(**inputs)
            taps = inputs["target_hidden"] if "target_hidden" in inputs else inputs["target_hidden_states"]
            self.steps.append(dict(taps=taps[0], positions=inputs["position_ids"][0], block=self.block, hidden=hidden[0]))
            return hidden

        setattr(draft, method, forward)

    def enter(self):
        self.in_target, self.outputs = True, {}

    def leave(self, output):
        self.in_target = False
        self.passes.append((self.outputs, output.logits[0].argmax(-1)))

    def layer(self, k, output):
        self.outputs[k] = (output[0] if isinstance(output, tuple) else output)[0]

    def embedded(self, ids):
        if not self.in_target:
            self.block = ids[0].clone()

    def drafted(self, logits):
        if not self.in_target:
            self.steps[-1]["drafts"] = logits[0].argmax(-1)

    def stop(self):
        for hook in self.hooks:
            hook.remove()
        delattr(self.draft, self.method)

    def accepted(self):
        """Drafts accepted in each step but the last: the rows that the next one brings, less the anchor's."""
        return [len(step["taps"]) - 1 for step in self.steps[1:]]

    def tensors(self, ids, steps):
        """The first `steps` steps. What the tapped layers put out is taken from the layers, not from the loop."""
        found = {"accepted": torch.tensor(self.accepted()[:steps])}
        for s in range(steps):
            step, (layers, _) = self.steps[s], self.passes[s]
            rows = len(step["taps"])
            tapped = {k: layers[k][:rows] for k in ids}
            assert torch.equal(torch.cat(list(tapped.values()), -1), step["taps"]), "the loop taps something else"
            found |= {f"step{s}.layer{k}": output for k, output in tapped.items()}
            found |= {f"step{s}.{key}": step[key] for key in ("positions", "block", "hidden", "drafts")}
            found[f"step{s}.choices"] = self.passes[s + 1][1]
        return found


def record(loop, target, draft, method, embed_tokens, lm_head, ids, steps=3):
    """Runs `loop(prompt)` until one step's drafts differ and are accepted in part, and another's rejected at once."""
    for seed in range(20_000):
        recorder = Recorder(target, draft, method, embed_tokens, lm_head, steps)
        try:
            loop(prompt(seed))
        except Done:
            pass
        recorder.stop()
        accepted = recorder.accepted()[:steps]
        drafts = [step["drafts"] for step in recorder.steps[:steps]]
        in_part = any(0 < a < len(d) and len(d.unique()) > 2 for a, d in zip(accepted, drafts))
        if len(accepted) == steps and in_part and 0 in accepted:
            print(f"    prompt {seed}, accepted {accepted}")
            return recorder.tensors(ids, steps)
    raise RuntimeError("no prompt whose drafts are accepted in part")
