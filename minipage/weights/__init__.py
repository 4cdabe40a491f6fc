"""Checkpoints: finding them, reading them, and streaming their tensors into the layout of a device.

hub.py, demo_model.py   a name to a local path: a folder, a GGUF file, a hub id, or the demo model
checkpoint.py           a path to an open checkpoint: config, generation config, vocabulary, tensors
safetensors.py          tensors of a Hugging Face folder
gguf.py                 tensors of a GGUF file; gguf_header.py reads its header, gguf_config.py translates it
loader.py               tensors to the parameters of a model, a few megabytes at a time
shards.py               what each of several ranks has of a model, and a source that reads no more
"""
