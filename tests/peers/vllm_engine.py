"""The loads of `kvern bench engine` on vLLM, in its own environment: python vllm_engine.py MODEL [--runs 5]."""

import argparse
import json
import random
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--load", action="append", help="SEQUENCESxINPUTxOUTPUT")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        args.model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    chosen = random.Random(0)
    loads = [
        tuple(map(int, text.split("x")))
        for text in args.load or ("1x32x128", "8x128x64", "32x128x64", "1x1024x1")
    ]
    rates: list[list[float]] = [[] for _ in loads]
    for turn in range(args.runs + 1):
        for i, (batch, input_len, output_len) in enumerate(loads):
            prompts = [
                TokensPrompt(prompt_token_ids=[chosen.randrange(2, 30_000) for _ in range(input_len)])
                for _ in range(batch)
            ]
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
            start = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            if turn:
                rates[i].append(batch * output_len / (time.perf_counter() - start))
    rows = [
        {"batch": batch, "input_len": input_len, "output_len": output_len, "tokens_per_s_runs": rate}
        for (batch, input_len, output_len), rate in zip(loads, rates, strict=True)
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
