"""`python -m pyllm` is the `pyllm` command."""

from pyllm.cli import app

app()
