"""Number formats of encoders and heads by name: float32, bfloat16, or what the processor is fast with."""

from typing import Any, Literal

import torch

Precision = Literal["float32", "bfloat16", "auto"]


def number_format(precision: Precision, device: torch.device | str = "cpu") -> torch.dtype:
    """The dtype of a precision's name."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    if torch.device(device).type == "cuda":
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        has_it = torch.device(device).type == "cpu" and any(capabilities.get(f"{s}_bf16") for s in ("avx512", "amx"))
    return torch.bfloat16 if has_it else torch.float32
