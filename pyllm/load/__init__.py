"""Model files from strangers, read safely: safetensors, GGUF, tokenizers, chat templates. Start at `open_checkpoint`."""

from .chat import ChatTemplateError, render_chat
from .checkpoint import Checkpoint, open_checkpoint
from .demo import demo_model_path
from .errors import CheckpointError
from .staging import on_device
from .tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "ChatTemplateError",
    "Checkpoint",
    "CheckpointError",
    "StreamDecoder",
    "Tokenizer",
    "demo_model_path",
    "on_device",
    "open_checkpoint",
    "render_chat",
]
