"""Put the example models, which live beside fxpipe/, into the wheel."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithModels(build_py):
    """Build, then copy models/*.py to fxpipe/example_models."""

    def run(self) -> None:
        super().run()
        target = Path(self.build_lib, "fxpipe", "example_models")
        for path in sorted(Path("models").glob("[!_]*.py")):
            if not self.editable_mode:
                self.copy_file(str(path), str(target / path.name))


setup(cmdclass={"build_py": BuildWithModels})
