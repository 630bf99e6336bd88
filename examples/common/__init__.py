"""What whole models share: attention over a cache, prefill and decode, sampling, text, loading, the command line.

Files, from the bottom up: `config.py`, `flash.py`, `flash_prefill.py`, `flash_decode.py`, `attention.py`, `cache.py`,
`float_moe.py`, `model.py`, `sampling.py`, `checkpoint.py`, `load.py`, `runner.py`, `text.py`, `command.py`.
"""
