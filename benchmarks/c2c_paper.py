"""What C2CServe's text states about its runs, for `c2c_sim`: numbers with the sentence, and where
they cannot all be true.

Figures were not at hand. Where the text states no setting, none is assumed to be the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stated:
    """A number that the text states; seconds unless `unit` says otherwise."""

    key: str
    value: str
    quote: str
    unit: str = "s"


STATED = (
    Stated(
        "figure_4b_link", "5.37 to 0.13", "reduces CPU-GPU transfers from 5.37 GB to 0.13 GB", "GB"
    ),
    Stated(
        "figure_4b_device", "1.23 to 5.18", "increases HBM traffic from 1.23 GB to 5.18 GB", "GB"
    ),
    Stated("figure_4a_1", "16.4 to 4.0", "reducing latency from 16.4 ms to 4.0 ms", "ms"),
    Stated("figure_4a_3", "alike", "... perform similarly with 3 MIG instances", ""),
    Stated("figure_4a_7", "slower", "while AsymGEMM becomes slower with 7 instances", ""),
    Stated("chunk_512", "2", "at a small chunk size of 512 ... only a 2% interference gap", "%"),
    Stated(
        "chunk_whole", "42", "the interference gap widens to 42% at the full-chunk setting", "%"
    ),
    Stated("footprint_small", "28", "from 5 GB to 44 GB ... the gap widens from 28% to 42%", "%"),
    Stated("footprint_large", "42", "from 5 GB to 44 GB ... the gap widens from 28% to 42%", "%"),
    Stated(
        "switch_dense", "0.05", "lowers switching overhead from 1.7 s ... and 119 ms ... to 50 ms"
    ),
    Stated("switch_dense_loader", "1.7", "1.7 s in ServerlessLLM"),
    Stated("switch_dense_tokens", "0.119", "119 ms in Aegaeon"),
    Stated("switch_moe", "0.318", "from 12 s in ServerlessLLM ... to 318 ms"),
    Stated("switch_moe_loader", "12", "12 s in ServerlessLLM"),
    Stated(
        "cold_dense_loader",
        "1.15-1.37",
        "reduces latency over ServerlessLLM by 1.15-1.37 on commonly supported models",
        "x",
    ),
    Stated("cold_moe_loader", "1.95", "outperforms ServerlessLLM by 1.95 on Qwen3-30B-A3B", "x"),
    Stated("dynamic_dense", "0.2-0.7", "On dense models, C2CServe keeps TTFT around 0.2-0.7 s"),
    Stated("dynamic_dense_loader", "2-7", "compared with 2-7 s for ServerlessLLM"),
    Stated("dynamic_dense_tokens", "0.3-2", "and 0.3-2 s for Aegaeon"),
    Stated("dynamic_moe", "0.5-0.8", "On MoE models, C2CServe stays around 0.5-0.8 s"),
    Stated("dynamic_in_1s", "95", "Under a 1 s TTFT target ... for 95% of requests", "%"),
    Stated("ablation_all", "0.64", "the smart scheduler ... reducing p99 TTFT to 0.64 s"),
    Stated("ablation_placement", "1.24", "random placement results in a p99 TTFT of 1.24 s"),
    Stated("ablation_chunk", "1.81", "the default configuration leads to a p99 TTFT of 1.81 s"),
    Stated("ablation_knob", "0.95", "the static configuration results in a p99 TTFT of 0.95 s"),
)

CONTRADICTIONS = (
    "By 6.2 an 8B model in host memory takes 35.7 ms a token at 450 GB/s, a resident one "
    "5 to 6: 'the same average TPOT' as ServerlessLLM cannot be.",
    "One read of a 70B takes 313 ms, of Mixtral 207: 'switching overhead' of 50 ms "
    "excludes the 70B, or the first token. What a switch is, is not said; here it is the "
    "first token of a short prompt.",
    "Cold start includes the disk for every system: what is not read faster cannot be 7.1 "
    "times as fast.",
    "TPOT targets are unstated; so are rates, lengths and models of the dynamic workload.",
    "Chunks of 512 read all weights once per 512 tokens, whole prompts once: by bytes "
    "small chunks load the link more, while 3.3.2 finds less interference.",
    "Table 1 has 56, 28 and 16 multiprocessors where the driver has 60, 32 and 26.",
)

NOT_MODELLED = (
    "ServerlessLLM's checkpoint format, migration and start of engines: `lru` stands for "
    "a loader that brings whole models at the link's rate",
    "Aegaeon's pooled prefill and decode instances: `swap` takes turns between whole "
    "answers, with `preemptive` between tokens, with KV kept on the device; a switch "
    "takes the same",
    "MoE-Infinity and FineMoE: expert caches",
    "disks and starts of engines: a cold start is a switch and the bytes at the rate of one disk, "
    "which the text does not name, one after the other",
    "Rubin's kernels: GB200's parts of its peaks are taken for it",
)

PAPER_MULTIPROCESSORS = {2: 56, 3: 28, 4: 16, 7: 16}
"""By number of equal slices of a GH200, as table 1 has them."""
