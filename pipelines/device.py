"""Where tensors are computed."""


def compute_device() -> str:
    """The accelerator of this machine (``cuda``, ``npu``, ...), else ``cpu``."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type
