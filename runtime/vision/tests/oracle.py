#!/usr/bin/env python3
"""Makes the fixtures of these tests: tiny random models, with the results of their original implementation.

    oracle.py CONVERTER [--only NAME]

Pillow resizes images and decodes files. transformers (with torch) creates a model for each projector, and computes the
rows of images, and the logits of a text with images. CONVERTER is llama.cpp's convert_hf_to_gguf.py, which writes the mmproj file and the language
model, which has no vocabulary. All weights are representable in F16.
"""

import argparse
import io
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import numpy
import PIL
import safetensors.torch
import torch
import transformers
from PIL import Image, ImageOps

FOLDER = pathlib.Path(__file__).resolve().parent / "fixtures"
PATCH = 4
# Width and height in pixels. Both are whole units of all encoders with images of any size, so that none is resized.
SIZES = [(40, 24), (16, 56)]
# An image with windows of all sizes: 112 pixels are one window.
WINDOWED = (128, 120)
TEXT = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
NORMAL = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


def qwen2vl():
    vision = {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH}
    config = transformers.Qwen2VLConfig(text_config=TEXT | rope(), vision_config=vision, **TOKENS)
    return transformers.Qwen2VLForConditionalGeneration(config), NORMAL


def qwen25vl():
    vision = {"depth": 4, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48}
    vision |= {"patch_size": PATCH, "window_size": 112, "fullatt_block_indexes": [1, 3]}
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT | rope(), vision_config=vision, **TOKENS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config), NORMAL


def qwen3vl():
    vision = {"depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48}
    vision |= {"patch_size": PATCH, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    text = TEXT | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return transformers.Qwen3VLForConditionalGeneration(config), {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def gemma3():
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": PATCH}
    # The window is shorter than an image, and the sixth layer has none.
    text = TEXT | {"head_dim": 16, "sliding_window": 3, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60)
    preprocessing = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": 4}
    return transformers.Gemma3ForConditionalGeneration(config), preprocessing


def rope():
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}}


MODELS = {"qwen2vl": qwen2vl, "qwen25vl": qwen25vl, "qwen3vl": qwen3vl, "gemma3": gemma3}


def image_of(width, height):
    """The image that the tests compute in the same way."""
    values = [(at * 2654435761 >> 13) & 255 for at in range(width * height * 3)]
    return Image.fromarray(numpy.array(values, dtype=numpy.uint8).reshape(height, width, 3))


def normal(image, preprocessing):
    pixels = numpy.asarray(image, dtype=numpy.float32) / numpy.float32(255)
    mean, std = (numpy.array(preprocessing[key], dtype=numpy.float32) for key in ("image_mean", "image_std"))
    return torch.from_numpy((pixels - mean) / std).permute(2, 0, 1)


def merged_patches(pixels, merge=2):
    """Patches of two equal frames in the order of Qwen's processor."""
    _, height, width = pixels.shape
    rows, columns = height // PATCH, width // PATCH
    frames = torch.stack([pixels, pixels])
    frames = frames.reshape(1, 2, 3, rows // merge, merge, PATCH, columns // merge, merge, PATCH)
    frames = frames.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return frames.reshape(rows * columns, -1), torch.tensor([[1, rows, columns]])


def rows_of(model, name, image, preprocessing):
    pixels = normal(image, preprocessing)
    if name == "gemma3":
        features = model.model.get_image_features(pixels[None])
        return features.pooler_output[0]
    patches, grid = merged_patches(pixels)
    features = model.model.get_image_features(patches, grid)
    rows = torch.cat(list(features.pooler_output))
    deep = getattr(features, "deepstack_features", None) or []
    deep = [part if torch.is_tensor(part) else torch.cat(list(part)) for part in deep]
    return torch.cat([rows, *deep], dim=1)


def logits_of(model, name):
    """The logits of a text with two images: the first one between tokens, the second one at the end."""
    preprocessing = MODELS[name]()[1]
    sizes = [(32, 32)] * 2 if name == "gemma3" else [SIZES[0], SIZES[1]]
    images = [normal(image_of(width, height), preprocessing) for width, height in sizes]
    counts = [4, 4] if name == "gemma3" else [width * height // (2 * PATCH) ** 2 for width, height in sizes]
    ids = [3, 7, *[60] * counts[0], 9, 11, 13, *[60] * counts[1]]
    tokens = torch.tensor([ids])
    types = (tokens == 60).int()
    if name == "gemma3":
        logits = model(input_ids=tokens, pixel_values=torch.stack(images), token_type_ids=types).logits
    else:
        patches, grids = zip(*[merged_patches(image) for image in images])
        logits = model(input_ids=tokens, pixel_values=torch.cat(patches), image_grid_thw=torch.cat(grids), mm_token_type_ids=types).logits
    # -1 stands for a token of an image.
    ids = [-1 if token == 60 else token for token in ids]
    return {"sizes": sizes, "tokens": ids, "logits": [round(value, 7) for value in logits.ravel().tolist()]}


def converted(converter, folder, target, *flags):
    """Converts a model, without its vocabulary."""
    code = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1].rsplit('/', 1)[0]); import conversion;"
        "find = conversion.get_model_class;"
        "none = lambda model: (model._set_vocab_none(), model.gguf_writer.add_vocab_size(64));"
        "without = lambda kind: (setattr(kind, 'set_vocab', none), kind)[1];"
        "conversion.get_model_class = lambda *args, **named: without(find(*args, **named));"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, converter, folder, "--outtype", "f32", "--outfile", target, *flags]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr)


def sizes_of(name):
    return {"gemma3": [(32, 32)], "qwen25vl": [*SIZES, WINDOWED]}.get(name, SIZES)


def fixture(name, converter):
    torch.manual_seed(len(name))
    with torch.no_grad():
        model, preprocessing = MODELS[name]()
        model.eval()
        for key, weight in model.named_parameters():
            # Norms begin with ones, and biases with zeros: those would hide mistakes.
            spread = 0.4 if weight.ndim == 1 else 1.0 / weight[0].numel() ** 0.5
            weight.copy_((torch.randn_like(weight) * spread + (1.0 if is_norm(key) else 0.0)).half().float())
        cases = []
        for width, height in sizes_of(name):
            rows = rows_of(model, name, image_of(width, height), preprocessing)
            values = [float(numpy.float32(value)) for value in rows.ravel().tolist()]
            cases.append({"width": width, "height": height, "rows": [round(value, 9) for value in values]})
        text = logits_of(model, name)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        rename(pathlib.Path(folder) / "model.safetensors")
        (pathlib.Path(folder) / "preprocessor_config.json").write_text(json.dumps(preprocessing))
        vocabulary = {"model": {"vocab": {str(token): token for token in range(64)}}, "added_tokens": []}
        (pathlib.Path(folder) / "tokenizer.json").write_text(json.dumps(vocabulary))
        converted(converter, folder, FOLDER / f"{name}.gguf", "--mmproj")
        converted(converter, folder, FOLDER / f"{name}-text.gguf")
    result = json.dumps({"transformers": transformers.__version__, "cases": cases, "text": text})
    (FOLDER / f"{name}.json").write_text(result + "\n")
    print(name, [len(case["rows"]) for case in cases])


def rename(path):
    """Gives tensors the names that published models have."""
    tensors = safetensors.torch.load_file(path)
    old = re.compile(r"^(model\.)?vision_tower\.(?!vision_model)")
    tensors = {old.sub("vision_tower.vision_model.", name): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, path)


def is_norm(key):
    return "norm" in key and key.endswith("weight") or "ln_q.weight" in key


def fnv(data):
    """The hash FNV-1a."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return f"{value:016x}"


def resized():
    """Sizes, filters, and hashes of what Pillow makes of images."""
    rng = random.Random(1)
    extent = lambda: int(2 ** rng.uniform(0, 8))
    filters = {"bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC, "lanczos": Image.LANCZOS}
    sizes = [[extent(), extent(), extent(), extent()] for _ in range(500)]
    sizes += [[1, 1, 28, 28], [20000, 1, 56, 28], [1, 20000, 28, 56], [3, 5, 3, 5], [300, 7, 300, 3]]
    cases = []
    for width, height, to_width, to_height in sizes:
        name = rng.choice(sorted(filters))
        image = image_of(width, height).resize((to_width, to_height), filters[name])
        cases.append([width, height, to_width, to_height, name, fnv(image.tobytes())])
    (FOLDER / "resized.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


def decoded():
    """Files in many modes, and the RGB pixels that Pillow makes of them."""
    base = image_of(11, 7)
    alpha = image_of(11, 7).convert("L")
    with_alpha = base.copy()
    with_alpha.putalpha(alpha)
    deep = numpy.array([(at * 2654435761 >> 7) & 0xFFFF for at in range(77)], dtype=numpy.uint16).reshape(7, 11)
    images = {
        "rgb": (base, "PNG", {}),
        "rgba": (with_alpha, "PNG", {}),
        "grey": (alpha, "PNG", {}),
        "grey with alpha": (with_alpha.convert("LA"), "PNG", {}),
        "one bit": (alpha.convert("1"), "PNG", {}),
        "palette": (base.convert("P"), "PNG", {}),
        "palette of 2 bits": (base.quantize(4), "PNG", {"bits": 2}),
        "palette with transparency": (base.convert("P"), "PNG", {"transparency": 3}),
        "16 bits": (Image.fromarray(deep), "PNG", {}),
        "one pixel": (image_of(1, 1), "PNG", {}),
        "one row": (image_of(20000, 1), "PNG", {}),
        "webp": (base, "WEBP", {"lossless": True}),
        "webp with alpha": (with_alpha, "WEBP", {"lossless": True, "exact": True}),
        "gif": (base.convert("P"), "GIF", {}),
        "animation": (base.convert("P"), "GIF", {"save_all": True, "append_images": [alpha.convert("P")]}),
        "jpeg": (base, "JPEG", {"subsampling": 0, "quality": 95}),
        "grey jpeg": (alpha, "JPEG", {"quality": 95}),
        "progressive": (base, "JPEG", {"subsampling": 0, "progressive": True}),
    }
    for turn in range(2, 9):
        exif = Image.Exif()
        exif[0x112] = turn
        images[f"turned {turn}"] = (base, "JPEG", {"subsampling": 0, "quality": 95, "exif": exif})
    cases = []
    for name, (image, kind, options) in images.items():
        file = io.BytesIO()
        image.save(file, kind, **options)
        read = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
        # Pillow makes nearly all values of 16 bits white, stb_image keeps the upper ones.
        read = Image.fromarray((deep >> 8).astype(numpy.uint8)) if name == "16 bits" else read
        read = read.convert("RGB")
        # Decoders of JPEG round differently.
        pixels = list(read.tobytes()) if kind == "JPEG" else fnv(read.tobytes())
        cases.append({"name": name, "file": list(file.getvalue()), "size": read.size, "pixels": pixels})
    (FOLDER / "decoded.json").write_text(json.dumps({"pillow": PIL.__version__, "cases": cases}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("converter")
    parser.add_argument("--only", choices=MODELS)
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if not args.only:
        resized()
        decoded()
    for name in [args.only] if args.only else MODELS:
        fixture(name, args.converter)


if __name__ == "__main__":
    main()
