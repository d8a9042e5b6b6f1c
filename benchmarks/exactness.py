"""Moving memory never changes a token, in float32.

- `families`: for each a small random model (`benchmarks/families.py`), 6 prompts at once of
  different lengths, 48 greedy tokens each, against `transformers`: once for each of `PATHS` that
  knows it.
- `adapters`: three LoRA adapters of different ranks and modules, and their base, in one batch,
  against `transformers` with each adapter's weights merged in; on each of `PATHS`.
- `pressure`: three models in a pool so small that models are evicted and requests preempted in
  mid-generation, against `transformers`.
- `remap`: the same, while which layers rotate, and through how many slots, changes at random every
  few steps (`benchmarks/rotations.py`): on each of `PATHS`, against `transformers`, and seeded
  sampling against the undisturbed run.
- `streams`: the same, while random KV blocks stream too, in the same passes, and parts of models
  are evicted at random.
- `sampling`: seeded sampling, the pressured run against the same requests served alone.

Every token of ours is compared with the reference's choice after the *same* tokens, so one
difference does not hide those behind it. Where the reference's two best candidates differ by less
than 1e-4, a difference is a tie: counted, and the comparison goes on. Log-probabilities are within
1e-4. Of greedy output, no more than a quarter may be one token: else it would prove nothing.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.errors import UnsupportedModel
from ballast.core.request import Sampling, Submission
from ballast.core.rotation import WHOLE
from ballast.core.settings import AdapterSettings, DeviceSettings, FleetSettings, ModelSettings, Slo
from ballast.core.units import KiB, MiB
from ballast.weights.checkpoint import read_spec
from benchmarks.adapters import merged, random_adapter
from benchmarks.common import finish, options
from benchmarks.families import FAMILIES, VOCAB, config, make
from benchmarks.random_stages import RandomStages
from benchmarks.rotations import RandomRotations

MARGIN = 1e-4
NEW_TOKENS = 64
PATHS: dict[str, dict[str, Any]] = {
    "generic": {"model_impl": "generic", "linear": "plain"},
    "generic_packed": {"model_impl": "generic", "linear": "packed"},
    "fused": {"model_impl": "fused", "linear": "plain"},
    "fused_packed": {"model_impl": "fused", "linear": "packed"},
}
"""Ways to run a model, by name: what its settings say beside the usual."""


@dataclass
class Verdict:
    """Of a comparison with the reference, token by token."""

    tokens: int = 0
    wrong: int = 0
    ties: int = 0
    margin: float = MARGIN
    """Difference of logits, and error of log-probabilities, that counts for nothing."""
    logprob_error: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)

    @property
    def most_repeated(self) -> float:
        """Share of the most frequent token."""
        return max(self.chosen.values(), default=0) / max(1, self.tokens)

    @property
    def ok(self) -> bool:
        exact = self.wrong == 0 and self.logprob_error <= self.margin
        return self.tokens > 0 and exact and self.most_repeated <= 0.25

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "tokens": self.tokens,
            "wrong": self.wrong,
            "ties": self.ties,
            "logprob_error": self.logprob_error,
            "most_repeated": self.most_repeated,
        }


def prompts(n: int, seed: int) -> list[tuple[int, ...]]:
    """`n` prompts of lengths spread over 1 .. 200."""
    rng = random.Random(seed)
    lengths = [1 + i * 199 // max(1, n - 1) for i in range(n)]
    return [tuple(rng.randrange(VOCAB) for _ in range(length)) for length in lengths]


def compare(
    reference: torch.nn.Module, prompt: tuple[int, ...], answer: Answer, v: Verdict
) -> None:
    """Our greedy tokens against the reference's choice after the same tokens."""
    assert answer.finished.output_tokens == len(answer.tokens)
    v.chosen.update(answer.tokens)
    ids = torch.tensor([[*prompt, *answer.tokens]])
    with torch.inference_mode():
        logits = reference(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
    best = logits.topk(2, dim=-1)
    logprobs = logits.log_softmax(-1)
    for i, token in enumerate(answer.tokens):
        v.tokens += 1
        if token != int(best.indices[i, 0]):
            if float(logits[i].max() - logits[i, token]) < v.margin:
                v.ties += 1
            else:
                v.wrong += 1
        ours = answer.logprobs[i]
        assert ours is not None
        v.logprob_error = max(v.logprob_error, abs(ours - float(logprobs[i, token])))


def fleet(
    paths: Mapping[str, Path], budget: int, more: Mapping[str, Any] | None = None
) -> FleetSettings:
    """Models at `paths`, with `more` in the settings of each."""
    common = {"dtype": "float32", "slo": Slo(ttft=0.5, tpot=0.1), **(more or {})}
    models = tuple(
        ModelSettings(name=name, path=str(path), **common) for name, path in paths.items()
    )
    device = DeviceSettings(
        budget_bytes=budget, page_bytes=64 * KiB, step_tokens=96, step_logits=16
    )
    return FleetSettings(models=models, device=device)


def asked(
    models: list[str], n: int, seed: int, temperature: float = 0.0, new_tokens: int = NEW_TOKENS
) -> list[Submission]:
    """`n` requests for each model, interleaved."""
    made = []
    for i, prompt in enumerate(prompts(n, seed)):
        for model in models:
            sampling = Sampling(temperature=temperature, top_p=0.95, seed=1000 + i, logprobs=0)
            made.append(
                Submission(
                    id=f"{model}-{i}",
                    model=model,
                    prompt=prompt,
                    max_tokens=new_tokens,
                    sampling=sampling,
                    ignore_eos=True,
                )
            )
    return made


def reference(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model


def check_family(path: Path, settings: Mapping[str, Any]) -> Verdict:
    """A model alone, with `settings`, several requests at once."""
    verdict = Verdict()
    model = reference(path)
    requests = asked(["model"], 6, seed=1, new_tokens=48)
    with InProcess(fleet({"model": path}, 96 * MiB, settings)) as server:
        answers = server.generate(requests)
    for r in requests:
        compare(model, r.prompt, answers[r.id], verdict)
    return verdict


def _is_known(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a model can be served with these settings: not every one has a fast path."""
    try:
        read_spec(ModelSettings(name="model", path=str(directory), **settings))
    except UnsupportedModel:
        return False
    return True


def check_families(scratch: Path) -> dict[str, dict[str, Any]]:
    """By family: `ok`, and the verdict on every path that knows it."""
    found = {}
    for family in FAMILIES:
        make(scratch / family, config(family))
        paths = {p: more for p, more in PATHS.items() if _is_known(scratch / family, more)}
        verdicts = {path: check_family(scratch / family, more) for path, more in paths.items()}
        found[family] = {
            "ok": all(v.ok for v in verdicts.values()),
            **{path: v.to_json() for path, v in verdicts.items()},
        }
    return found


def check_adapters(scratch: Path) -> dict[str, Any]:
    """`ok`, and the verdict on every path."""
    base = scratch / "base"
    make(base, config("llama"))
    model = reference(base)
    adapters = [
        random_adapter(model, scratch / "all", 1, rank=8),
        random_adapter(model, scratch / "attention", 2, rank=3, only=("q_proj", "k_proj"), rs=True),
        random_adapter(model, scratch / "rest", 3, rank=17, only=("up_proj", "lm_head")),
    ]
    by_name = {a.path.name: a for a in adapters}
    requests = asked(["model", *by_name], 4, seed=4, new_tokens=32)
    found = {}
    for path, more in PATHS.items():
        named = tuple(AdapterSettings(name=n, path=str(a.path)) for n, a in by_name.items())
        verdict = Verdict()
        with InProcess(fleet({"model": base}, 96 * MiB, {**more, "adapters": named})) as server:
            answers = server.generate(requests)
        for r in requests:
            adapter = by_name.get(r.model)
            with nullcontext(model) if adapter is None else merged(model, adapter) as whole:
                compare(whole, r.prompt, answers[r.id], verdict)
        found[path] = verdict
    return {
        "ok": all(v.ok for v in found.values()),
        **{path: v.to_json() for path, v in found.items()},
    }


def make_llama(directory: Path, seed: int, **changes: int) -> Path:
    """One that is large enough to be in the way of others."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        **changes,
    }
    plain = {"initializer_range": 0.1, "attention_bias": False, "rope_parameters": None}
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    make(directory, config("llama", **sizes, **plain, head_dim=head_dim), seed)
    return directory


def tight(
    paths: dict[str, Path],
    preset: str = "balloon",
    more: Mapping[str, Any] | None = None,
    models: int = 2,
) -> FleetSettings:
    """A budget for the arena, the weights of two `models` and the KV of a few requests."""
    roomy = replace(fleet(paths, 512 * MiB, more), preset=preset)
    with InProcess(roomy) as server:
        state = server.device.state
        page = roomy.device.page_bytes
        weights = max(m.weights.pages for m in state.models.values())
        kv = max(m.kv.layout.pages(-(-264 // m.spec.block_tokens)) for m in state.models.values())
        pages = state.arena.pages + models * weights + 2 * models * kv
    return replace(roomy, device=replace(roomy.device, budget_bytes=pages * page))


def run_tight(
    settings: FleetSettings, requests: list[Submission]
) -> tuple[dict[str, Answer], dict[str, int]]:
    with InProcess(settings) as server:
        answers = server.generate(requests)
        report = server.device.snapshot()
    moved = {
        key: sum(getattr(m, key) for m in report.models)
        for key in ("activations", "evictions", "preemptions")
    }
    return answers, moved


def check_remap(scratch: Path, n: int, *, kv: bool = False, quick: bool = False) -> dict[str, Any]:
    """`ok`; on every path the verdict, the plans there were, and the layers they brought; and
    whether seeded sampling, too, gives what it gives undisturbed. `n` requests of each model;
    `kv`: it streams as well, and parts are evicted; `quick`: of fewer layers and tokens."""
    deep = {"hidden_size": 128, "intermediate_size": 256}
    # Whole blocks of each fill a page, which others cannot be staged of.
    layers, tokens = ((8, 7, 6), 24) if quick else ((14, 9, 7), NEW_TOKENS)
    paths = {
        name: make_llama(scratch / name, i, num_hidden_layers=of, **deep)
        for i, (name, of) in enumerate(zip(("llama", "second", "third"), layers, strict=True))
    }
    settings = tight(paths, "swiftcache" if kv else "balloon")
    greedy = asked(list(paths), n, seed=2, new_tokens=tokens)
    models = {name: reference(path) for name, path in paths.items()}
    found: dict[str, dict[str, Any]] = {}
    for path, more in PATHS.items():
        changed = tuple(replace(m, **more) for m in settings.models)
        verdict, counted = Verdict(), Counter[str]()
        answers = _disturbed(replace(settings, models=changed), greedy, counted)
        for r in greedy:
            compare(models[r.model], r.prompt, answers[r.id], verdict)
        moved = verdict.ok and counted["Remap"] > 20 and counted["loads"] > 100
        both = min(counted["Stage"], counted["evictions"], counted["both"])
        moved = moved and (not kv or both > 5)
        found[path] = {**verdict.to_json(), **counted, "ok": moved}
    sampled = asked(list(paths), n, seed=3, temperature=0.8, new_tokens=tokens)
    counted = Counter[str]()
    rotating = _disturbed(settings, sampled, counted)
    with InProcess(fleet(paths, 512 * MiB)) as server:
        differing = _differing(rotating, server.generate(sampled))
    ok = not differing and all(f["ok"] for f in found.values())
    return {"ok": ok, "sampling": {"differing": differing, **counted}, **found}


def _disturbed(
    settings: FleetSettings, requests: list[Submission], counted: Counter[str]
) -> dict[str, Answer]:
    """The answers of a server whose layers stream at random; what that took is counted."""
    with InProcess(settings) as server:
        loop, state = server.device.loop, server.device.state
        policy = RandomRotations(loop.preset.memory)
        if loop.preset.requires.kv_staging:
            policy = RandomRotations(RandomStages(loop.preset.memory), evictions=20)
        loop.use_preset(replace(loop.preset, memory=policy))
        server.listen = lambda now, output: counted.update(
            both=sum(m.rotation != WHOLE and bool(m.kv.staged) for m in state.models.values())
        )
        answers = server.generate(requests)
        counted.update(
            entry["action"] for entry in server.device.decisions() if "refused" not in entry
        )
        counted["evictions"] = sum(m.evictions for m in state.models.values())
        for m in state.models.values():
            if m.weights.stream is not None:
                counted["loads"] += m.weights.stream.loads.n
                counted["preemptions"] += m.preemptions
    return answers


def _differing(ours: Mapping[str, Answer], theirs: Mapping[str, Answer]) -> list[str]:
    return [id for id, answer in ours.items() if answer.tokens != theirs[id].tokens]


def check_pressure(scratch: Path, n: int) -> dict[str, dict[str, Any]]:
    """The parts `pressure` and `sampling`."""
    paths = {
        "llama": make_llama(scratch / "a", 0),
        "second": make_llama(scratch / "b", 1, num_hidden_layers=3),
        "third": make_llama(scratch / "c", 2, num_key_value_heads=8),
    }
    settings = tight(paths)
    greedy = asked(list(paths), n, seed=2)
    answers, moved = run_tight(settings, greedy)
    pressure = Verdict()
    models = {name: reference(path) for name, path in paths.items()}
    for r in greedy:
        compare(models[r.model], r.prompt, answers[r.id], pressure)
    sampled = asked(list(paths), n, seed=3, temperature=0.8)
    disturbed, moved_sampling = run_tight(settings, sampled)
    undisturbed: dict[str, Answer] = {}
    with InProcess(fleet(paths, 512 * MiB)) as server:
        for r in sampled:
            undisturbed |= server.generate([r])
    differing = _differing(disturbed, undisturbed)
    return {
        "pressure": {
            **pressure.to_json(),
            **moved,
            "ok": pressure.ok and moved["evictions"] > 0 and moved["preemptions"] > 0,
        },
        "sampling": {
            "ok": not differing and moved_sampling["preemptions"] > 0,
            "requests": len(sampled),
            "differing": differing,
            **moved_sampling,
        },
    }


PARTS = ("families", "adapters", "remap", "streams", "pressure")
"""The last one has `sampling` with it."""


def main() -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some parts")

    args = options(__doc__, extra=extra)
    n, quick = (4, True) if args.quick else (10, False)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for part in args.only:
            if part == "families":
                result[part] = check_families(scratch / part)
            elif part == "adapters":
                result[part] = check_adapters(scratch / part)
            elif part == "pressure":
                result |= check_pressure(scratch / part, n)
            else:
                kv = part == "streams"
                result[part] = check_remap(scratch / part, n, kv=kv, quick=quick and kv)
    families = result.get("families", {})
    rest = (found for part, found in result.items() if part != "families")
    result["ok"] = all(found["ok"] for found in (*families.values(), *rest))
    finish(args, "exactness", result)


if __name__ == "__main__":
    main()
