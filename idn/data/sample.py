"""A sample's files as WebDataset names them: an image and, in `.cls`, its class number."""

import numpy as np

from idn.data import images


def decode_image(files: dict[str, bytes], shape: tuple[int, int, int] | None) -> np.ndarray:
    for extension in images.EXTENSIONS:
        if extension in files:
            return images.decode(files[extension], extension, shape)
    raise images.BadImage(f"no image among its files ({', '.join(files)})")


def decode_label(files: dict[str, bytes], classes: int | None) -> int:
    """The class number; -1 for a sample without one where no classes were promised."""
    if "cls" not in files:
        if classes is None:
            return -1
        raise images.BadImage("no label (.cls) among its files")
    text = files["cls"].strip()
    if not text.isdigit() or (classes is not None and int(text) >= classes):
        wanted = f"a number from 0 to {classes - 1}" if classes else "a number"
        raise images.BadImage(f"label {text.decode(errors='replace')!r}, expected {wanted}")
    return int(text)
