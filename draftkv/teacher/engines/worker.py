"""vLLM behind two pipes: runs in the engine's environment, so it imports vLLM and the standard library alone.

One JSON object a line in, one out. `start` takes the arguments of `vllm.LLM`; `write`, `score` and `counters` answer
in the forms that `answers.py` checks. What fails is answered as {"error": text}.
"""

import json
import multiprocessing
import os
import sys
import threading
from multiprocessing import connection


def start(options):
    import vllm

    llm = vllm.LLM(**options)
    return llm, {"vllm": vllm.__version__, "max_model_len": llm.llm_engine.model_config.max_model_len}


def write(llm, requests, max_new_tokens, stops, ignore_eos=False):
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": r["prompt_ids"]} for r in requests]
    sampling = [
        SamplingParams(temperature=r["temperature"], seed=r["seed"], top_p=1.0, top_k=0, min_p=0.0, logprobs=0,
                       max_tokens=max_new_tokens, stop_token_ids=stops, ignore_eos=ignore_eos, detokenize=False)
        for r in requests
    ]  # fmt: skip
    answers = []
    for result in llm.generate(prompts, sampling, use_tqdm=False):
        output = result.outputs[0]
        ids = list(output.token_ids)
        logprobs = [entries[token].logprob for entries, token in zip(output.logprobs, ids, strict=True)]
        answers.append({"prompt_ids": list(result.prompt_token_ids), "ids": ids, "logprobs": logprobs,
                        "finish_reason": output.finish_reason})  # fmt: skip
    return {"answers": answers}


def score(llm, rows, k):
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": row["ids"]} for row in rows]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=k, detokenize=False)
    answers = []
    for row, result in zip(rows, llm.generate(prompts, sampling, use_tqdm=False), strict=True):
        positions = [
            None if entries is None else [] if place < row["prompt_len"]
            else [[token, entry.logprob, entry.rank] for token, entry in entries.items()]
            for place, entries in enumerate(result.prompt_logprobs)
        ]  # fmt: skip
        answers.append({"prompt_ids": list(result.prompt_token_ids), "positions": positions})
    return {"answers": answers}


def counters(llm):
    return {m.name: m.value for m in llm.get_metrics() if isinstance(getattr(m, "value", None), int)}


def leave_with(children, closing):
    """vLLM runs the model in processes of its own. Where one of them dies in the middle of a batch, `generate` may wait
    for ever: this process leaves then, and the other side starts another."""

    def watch():
        ended = connection.wait(list(children))
        if not closing.is_set():
            print(f"EngineDeadError: vLLM's process {children[ended[0]]} ended", file=sys.stderr, flush=True)
            os._exit(70)

    if children:
        threading.Thread(target=watch, daemon=True).start()


def main():
    # vLLM prints to standard output; answers go where nothing else is printed.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    closing = threading.Event()
    try:
        answer_all(out, closing)
    finally:
        closing.set()


def answer_all(out, closing):
    """Until there is no more to read, or vLLM's engine is dead."""
    llm = None
    for line in sys.stdin:
        message = json.loads(line)
        what = message.pop("what")
        try:
            if what == "start":
                llm, answer = start(**message)
                leave_with({child.sentinel: child.name for child in multiprocessing.active_children()}, closing)
            else:
                answer = {"write": write, "score": score, "counters": counters}[what](llm, **message)
        except Exception as error:  # whatever it is, the other side has to hear of it
            if type(error).__name__ == "EngineDeadError":
                raise  # vLLM's own process has ended and nothing will be answered: a new worker has to be started
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
