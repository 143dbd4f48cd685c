"""The supported model families, one file each; `get_family` selects one by config.json. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from mslime.config.model_facts import read_hf_config
from mslime.convert.families.deepseek import DeepseekV2, DeepseekV3
from mslime.convert.families.dots1 import Dots1
from mslime.convert.families.family import Family, ModelFields, Support, as_list, as_object, refuse_unread, refused
from mslime.convert.families.glm4 import Glm4, Glm4Moe
from mslime.convert.families.gpt_oss import GptOss
from mslime.convert.families.llama import Llama
from mslime.convert.families.minimax_m2 import MiniMaxM2
from mslime.convert.families.mixtral import Mixtral
from mslime.convert.families.olmoe import Olmoe
from mslime.convert.families.qwen import Qwen2, Qwen3
from mslime.convert.families.qwen3_next import Qwen3Next, Qwen35Moe
from mslime.convert.families.qwen_moe import Qwen2Moe, Qwen3Moe

_ALL: tuple[Family, ...] = (
    DeepseekV2(), DeepseekV3(), Dots1(), Glm4(), Glm4Moe(), GptOss(), Llama(), MiniMaxM2(), Mixtral(), Olmoe(),
    Qwen2(), Qwen2Moe(), Qwen3(), Qwen3Moe(), Qwen3Next(), Qwen35Moe(),
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.architecture: family for family in _ALL}

__all__ = ["FAMILIES", "Family", "ModelFields", "Support", "as_object", "get_family", "read_hf_config", "refuse_unread"]


def get_family(hf_config: Mapping[str, object]) -> Family:
    """Family of a checkpoint.

    Raises:
        CheckpointError: the architecture is not supported.
    """
    named = hf_config.get("architectures")
    architecture = next(iter(as_list(named) or ()), None)
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise refused(
            "architectures", named, f"not supported. Supported: {', '.join(sorted(FAMILIES))}",
            "use a supported model, or add its file to mslime/convert/families",
        )  # fmt: skip
    return FAMILIES[architecture]
