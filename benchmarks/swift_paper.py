"""What SwiftCache's text states about its runs, for `swift_sim` and `swift_context`: numbers with
the sentence, and where they cannot all be true.

Figures were not at hand. Where the text states no setting, none is assumed to be the paper's.
"""

from __future__ import annotations

from benchmarks.c2c_paper import Stated

STATED = (
    Stated("p99_over_hicache_sharegpt", "0.33", "reduces P99 TTFT by approximately 67%", "x"),
    Stated("p99_over_hicache_leval", "0.31", "and 69% ... compared to SGLang (HiCache)", "x"),
    Stated("p99_over_lmcache_sharegpt", "0.46", "reduces P99 TTFT by approximately 54%", "x"),
    Stated("p99_over_lmcache_leval", "0.42", "and 58% ... Compared to vLLM (LMCache)", "x"),
    Stated("worker_ttft_14b", "9.7", "the maximum increases in TTFT ... reach 9.7%", "%"),
    Stated("worker_tpot_14b", "6.5", "Time-Per-Output-Token (TPOT) increases by up to 6.5%", "%"),
    Stated(
        "worker_ttft_32b", "7.9", "For Qwen3-32B as the worker, TTFT increases by up to 7.9%", "%"
    ),
    Stated("worker_tpot_32b", "6.4", "and TPOT by up to 6.4%", "%"),
    Stated(
        "worker_ttft_of_32b",
        "7.7",
        "when serving as the master ... TTFT increases by up to 7.7%",
        "%",
    ),
    Stated("worker_tpot_of_32b", "5.6", "and TPOT by up to 5.6%", "%"),
    Stated("load_part", "1.4", "KV cache loading ... less than 1.4% ... of the total latency", "%"),
    Stated("store_part", "1.1", "and storing account for ... 1.1% of the total latency", "%"),
    Stated("transfer_part", "0.1", "considering the overlap ... drops to below 0.1%", "%"),
    Stated("load_p99_32b", "11", "99% of requests have KV cache loading times under 11 ms", "ms"),
    Stated("store_p99_32b", "6", "99% of requests have KV cache storing times under 6 ms", "ms"),
    Stated("pcie_5k", "75", "PCIe-based loading takes around 75ms at 5k historical tokens", "ms"),
    Stated("compute_5k", "27", "while computation only takes about 27ms", "ms"),
    Stated("overhead_5k", "73.2", "the transfer overhead rises from 73.2%", "%"),
    Stated("overhead_50k", "86.2", "to 86.2% as history grows to 50k tokens", "%"),
    Stated("longest_over_8k", "1.58-3.98", "improvements ranging from 1.58x to 3.98x", "x"),
    Stated("longest_over_32k", "1.81-6.66", "in the range of 1.81x to 6.66x", "x"),
    Stated("lwm_v100", "18", "sequences up to 18K tokens on a 32GB V100 GPU", "K tokens"),
    Stated("lwm_h20", "160", "and up to 160K tokens even on a 96GB H20 GPU", "K tokens"),
)

CONTRADICTIONS = (
    "5, Metrics: interference is 'the ratio of the inference latency without interference to the "
    "inference latency under interference', which is below 1 the more there is; the figures are "
    "increases.",
    "Eq. 2 gives the master all of the workers' KV memory, 3.4 only what they do not need.",
    "75 ms for 5K tokens of LWM (2.5 GiB) are 35 GB/s, on a link of 32 GB/s that four GPUs share.",
    "With one buffer, load(i) can be hidden by the FFN of layer i - 1 alone. 20K remote tokens of "
    "LWM are 312 MiB a layer, 1.6 ms at 200 GB/s, and the FFN of 256 new tokens takes less than "
    "0.6: 'below 0.1%' cannot hold for long remote histories.",
    "Loads of Qwen3-32B below 11 ms for 99% of requests: at 200 GB/s those are 8.4K tokens, of "
    "histories of 20K to 40K. Three quarters of each history must have been local.",
    "4 says that transfers are optimised for the prefill stage; 5.3 counts blocks of the layer "
    "stream cache in the longest context, so that decode steps must stream as well.",
    "18K tokens of LWM on 32 GB and 160K on 96 GB: beside the weights that is 1.0 MiB a token on "
    "one device, 0.5 on the other. Its KV alone takes 0.5.",
    "Baselines have 96 GB of host memory together; who has which of the four GPUs is not stated.",
)
