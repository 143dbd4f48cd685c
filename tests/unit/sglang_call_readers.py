"""What SGLang's own detectors read in replies; run in a process of its own, as importing them takes a CPU platform.

Reads a JSON list of (detector, reply, tools) from the standard input and prints a JSON list of (text, calls).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mslime.backends.cpu import sglang as platform


def detectors() -> dict[str, Any]:
    from sglang.srt.function_call.deepseekv3_detector import DeepSeekV3Detector
    from sglang.srt.function_call.deepseekv31_detector import DeepSeekV31Detector
    from sglang.srt.function_call.glm4_moe_detector import Glm4MoeDetector
    from sglang.srt.function_call.kimik2_detector import KimiK2Detector
    from sglang.srt.function_call.mistral_detector import MistralDetector
    from sglang.srt.function_call.qwen3_coder_detector import Qwen3CoderDetector
    from sglang.srt.function_call.qwen25_detector import Qwen25Detector

    return {
        "Hermes": Qwen25Detector,
        "Qwen3-Coder": Qwen3CoderDetector,
        "GLM": Glm4MoeDetector,
        "DeepSeek-V3": DeepSeekV3Detector,
        "DeepSeek-V3.1": DeepSeekV31Detector,
        "Kimi-K2": KimiK2Detector,
        "Mistral, as a list": MistralDetector,
        "Mistral, by name": MistralDetector,
    }


def main() -> None:
    cases = json.load(sys.stdin)
    platform.install()
    from sglang.srt.entrypoints.openai.protocol import Tool

    known, answers = detectors(), list[Any]()
    for form, reply, tools in cases:
        read = known[form]().detect_and_parse(reply, [Tool(**tool) for tool in tools])
        answers.append((read.normal_text, [(call.name, json.loads(call.parameters)) for call in read.calls]))
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
