"""What setup.cfg cannot say: a .pth file goes into site-packages. An editable wheel too takes it as it is."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPth(build_py):
    """build_py, and the file that lets an interpreter know of the plugin."""

    def run(self):
        super().run()
        folder = self.get_finalized_command("install").install_purelib if self.editable_mode else self.build_lib
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.copy_file("zeropp_fp8_autoload.pth", str(Path(folder, "zeropp_fp8_autoload.pth")), preserve_mode=False)


setup(cmdclass={"build_py": BuildWithPth})
