"""The example models: `from fxpipe.example_models import gpt`.

An installed fxpipe has the modules here; in a checkout they are in `models/`, beside the
package. Nothing in fxpipe depends on them.
"""

from pathlib import Path

__all__: list[str] = []

_beside = Path(__file__).parents[2] / "models"
if (_beside / "gpt.py").is_file():
    __path__.append(str(_beside))
