"""A plugin of pytest for llama.cpp's tests of its server: nothing is downloaded before they begin."""

import utils


def load_all():
    """The models that are there are enough."""


utils.ServerPreset.load_all = staticmethod(load_all)
