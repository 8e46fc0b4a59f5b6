"""What setup.cfg cannot say: a .pth file goes into site-packages, and which links the long description has.

An editable wheel too takes the .pth file as it is.
"""

import re
from configparser import ConfigParser
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


def long_description():
    """The README; its links are absolute, as a package index needs them, if project_urls of setup.cfg has Source."""
    settings = ConfigParser()
    settings.read("setup.cfg", encoding="utf-8")
    urls = dict(re.findall(r"(\w+)\s*=\s*(\S+)", settings.get("metadata", "project_urls", fallback="")))
    text = Path("README.md").read_text(encoding="utf-8")
    if "Source" not in urls:
        return text
    base = urls["Source"].rstrip("/")
    text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\1{base}/raw/HEAD/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!\w+:|#)", rf"\1{base}/blob/HEAD/", text)


setup(cmdclass={"build_py": BuildWithPth}, long_description=long_description())
