"""Text to token ids, and tokens back to text.

tokenizer.py         a checkpoint's tokenizer; tokenizer_files.py reads a folder's, gguf_vocabulary.py rebuilds a GGUF file's
detokenizer.py       the text of a growing sequence, character by character
stop.py              stop strings in that text
chat.py              the messages of a chat to a prompt; lookalikes.py keeps them from spelling out control tokens
"""
