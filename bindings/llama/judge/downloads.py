"""A plugin of pytest for llama-cpp-python's own tests: files of this machine in the place of downloads.

SAMITE_JUDGE_MODEL is a small model; SAMITE_JUDGE_RECURRENT and SAMITE_JUDGE_HYBRID, if set, are models of these kinds.
"""

import os

import huggingface_hub


def download(repo_id, filename, **_):
    kinds = {"mamba": "SAMITE_JUDGE_RECURRENT", "Falcon-H1": "SAMITE_JUDGE_HYBRID"}
    for part, variable in kinds.items():
        if part in repo_id and variable in os.environ:
            return os.environ[variable]
    return os.environ["SAMITE_JUDGE_MODEL"]


huggingface_hub.hf_hub_download = download
