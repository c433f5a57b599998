"""The classes of `csrc/runtime` in plain Python, same results and messages, where there is no compiler. `pyllm.runtime.host` chooses."""
