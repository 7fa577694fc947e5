"""llama.cpp's log-probabilities of the token that follows some others."""
import json
import math

import xllamacpp


def logprobs(path, tokens, rows):
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 512
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    answer = server.handle_completions({"prompt": list(tokens), "n_predict": 1, "temperature": 0, "logprobs": rows,
                                        "cache_prompt": False, "ignore_eos": True, "stream": False, "samplers": ["temperature"]})
    if isinstance(answer, (str, bytes)):
        answer = json.loads(answer)
    if "choices" not in answer:
        raise SystemExit("gguf: llama.cpp refused %s: %s" % (path, answer))
    values = [-math.inf] * rows
    for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        values[one["id"]] = one["logprob"]
    return values
