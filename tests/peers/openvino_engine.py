"""The loads of `kvern bench engine` on OpenVINO GenAI, in its own environment: python openvino_engine.py EXPORT."""

import argparse
import json
import time

import numpy as np
import openvino_genai as genai
from openvino import Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--load", action="append", help="SEQUENCESxINPUTxOUTPUT")
    parser.add_argument("--precision", default="bf16", help="of activations")
    args = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_seqs = 32
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_PRECISION_HINT": args.precision, "INFERENCE_NUM_THREADS": 2}
    engine = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
    chosen = np.random.default_rng(0)
    loads = [
        tuple(map(int, text.split("x")))
        for text in args.load or ("1x32x128", "8x128x64", "32x128x64", "1x1024x1")
    ]
    rates: list[list[float]] = [[] for _ in loads]
    for turn in range(args.runs + 1):
        for i, (batch, input_len, output_len) in enumerate(loads):
            config = genai.GenerationConfig(max_new_tokens=output_len, ignore_eos=True, do_sample=False)
            prompts = [Tensor(chosen.integers(2, 30_000, (1, input_len))) for _ in range(batch)]
            start = time.perf_counter()
            engine.generate(prompts, [config] * batch)
            if turn:
                rates[i].append(batch * output_len / (time.perf_counter() - start))
    rows = [
        {"batch": batch, "input_len": input_len, "output_len": output_len, "tokens_per_s_runs": rate}
        for (batch, input_len, output_len), rate in zip(loads, rates, strict=True)
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
