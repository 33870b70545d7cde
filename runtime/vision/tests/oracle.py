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
import types

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
# The text model of encoders that do not need the larger one.
SMALL = TEXT | {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 16}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
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


def idefics3():
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": PATCH}
    text = SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    config = transformers.Idefics3Config(text_config=text, vision_config=vision, image_token_id=60, scale_factor=2)
    return transformers.Idefics3ForConditionalGeneration(config), HALF | {"size": {"longest_edge": 48}}


def internvl():
    config = transformers.InternVLConfig(text_config=SMALL | {"model_type": "qwen2"}, vision_config=internvit(attention_bias=True), image_token_id=60)
    return transformers.InternVLForConditionalGeneration(config), NORMAL


def internvl6b():
    """The larger vision transformer: RMS norms, also of queries and keys, and no biases of them."""
    vision = internvit(norm_type="rms_norm", use_qk_norm=True)
    config = transformers.InternVLConfig(text_config=SMALL | {"model_type": "qwen2"}, vision_config=vision, image_token_id=60)
    return transformers.InternVLForConditionalGeneration(config), NORMAL


def internvit(**options):
    # The converter has names for a projector's three layers only if there are four of these.
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    return vision | {"image_size": 16, "patch_size": PATCH} | options


def pixtral():
    vision = pixtral_vision() | {"hidden_act": "silu"}
    config = transformers.LlavaConfig(
        text_config=SMALL | {"model_type": "mistral", "sliding_window": None}, vision_config=vision,
        image_token_index=60, vision_feature_layer=-1, vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration(config), NORMAL


def mistral3():
    """The vision transformer of Mistral Small 3.1, whose patches are merged."""
    config = transformers.Mistral3Config(
        text_config=SMALL | {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": None},
        vision_config=pixtral_vision(), image_token_index=60, spatial_merge_size=2,
    )
    return transformers.Mistral3ForConditionalGeneration(config), NORMAL


def pixtral_vision():
    # The converter has names for a projector's two layers only if there are three of these.
    vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 3}
    return vision | {"num_attention_heads": 2, "image_size": 64, "patch_size": PATCH}


def llava():
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": PATCH}
    config = transformers.LlavaConfig(text_config=SMALL | {"model_type": "llama"}, vision_config=vision, image_token_index=60)
    return transformers.LlavaForConditionalGeneration(config), NORMAL


def llava_file(converter, model, preprocessing, target):
    """Writes the file that the older of llama.cpp's scripts write: without the last layer, and with the names of the
    two matrices of a layer interchanged."""
    sys.path.insert(0, str(pathlib.Path(converter).parent / "gguf-py"))
    import gguf

    config = model.config.vision_config
    writer = gguf.GGUFWriter(target, "clip")
    for key, value in {"clip.has_vision_encoder": True, "clip.has_llava_projector": True, "clip.use_gelu": False}.items():
        writer.add_bool(key, value)
    writer.add_string("clip.projector_type", "mlp")
    counts = {"image_size": config.image_size, "patch_size": config.patch_size, "embedding_length": config.hidden_size}
    counts |= {"feed_forward_length": config.intermediate_size, "projection_dim": config.projection_dim}
    counts |= {"attention.head_count": config.num_attention_heads, "block_count": config.num_hidden_layers - 1}
    for key, value in counts.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", config.layer_norm_eps)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", preprocessing[key])
    names = [("encoder.layers", "blk"), ("embeddings.", ""), ("embedding", "embd"), ("self_attn.", "attn_"), ("_proj", ""), ("layer_norm", "ln")]
    names += [("pre_layrnorm", "pre_ln"), ("mlp.fc1", "ffn_down"), ("mlp.fc2", "ffn_up")]
    for name, weight in model.model.vision_tower.named_parameters():
        name = name.removeprefix("vision_model.")
        if name.startswith(("post_layernorm", f"encoder.layers.{config.num_hidden_layers - 1}")):
            continue
        for old, new in names:
            name = name.replace(old, new)
        writer.add_tensor(f"v.{name}", weight.detach().numpy())
    for name, weight in model.model.multi_modal_projector.named_parameters():
        writer.add_tensor(name.replace("linear_1", "mm.0").replace("linear_2", "mm.2"), weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def lfm2():
    # The converter has names for a projector's two layers only if there are three of these.
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    # The converter has patches of this size only.
    vision |= {"patch_size": 16, "vision_use_head": False}
    text = SMALL | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
    text |= {"block_auto_adjust_ff_dim": False}
    del text["head_dim"]
    config = transformers.Lfm2VlConfig(text_config=text, vision_config=vision, image_token_id=60, projector_hidden_size=24)
    return transformers.Lfm2VlForConditionalGeneration(config), HALF


def naflex(images):
    """Patches of images of one size, and what the model needs to know of them."""
    count, _, height, width = images.shape
    patches = images.unflatten(2, (-1, 16)).unflatten(4, (-1, 16)).permute(0, 2, 4, 3, 5, 1)
    shapes = torch.tensor([[height // 16, width // 16]] * count)
    patches = patches.reshape(count, -1, 16 * 16 * 3)
    return {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": torch.ones(patches.shape[:2]).int()}


def gemma4v():
    vision = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    vision |= {"num_key_value_heads": 2, "patch_size": PATCH, "position_embedding_size": 20, "standardize": True}
    vision |= {"use_clipped_linears": True}
    text = SMALL | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    text |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 32}
    # The window is shorter than an image.
    text |= {"sliding_window": 4, "use_bidirectional_attention": "vision", "final_logit_softcapping": 30.0}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, image_token_id=60)
    model = transformers.Gemma4ForConditionalGeneration(config)
    for name, buffer in model.model.vision_tower.named_buffers():
        if "std_" in name:
            buffer.copy_(torch.randn_like(buffer).half().float() * 0.5 + 1)
        # Limits that some elements exceed.
        limit = {"input": 1.5, "output": 0.75}.get(name.rpartition(".")[2].split("_")[0])
        if limit:
            buffer.fill_(limit if name.endswith("max") else -limit)
    return model, {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}


def rope():
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}}


MODELS = {"qwen2vl": qwen2vl, "qwen25vl": qwen25vl, "qwen3vl": qwen3vl, "gemma3": gemma3, "idefics3": idefics3}
MODELS |= {"internvl": internvl, "internvl6b": internvl6b, "pixtral": pixtral, "mistral3": mistral3, "llava": llava, "lfm2": lfm2, "gemma4v": gemma4v}
# Variants of an encoder, whose rows are compared, but not the logits after them.
WITHOUT_TEXT = ["internvl6b", "mistral3"]
# Encoders with a token after each row of an image but the last one.
WITH_BREAKS = ["pixtral", "mistral3"]
BREAK = 12
# Sizes of the images of encoders that divide them into tiles.
TILED = {"idefics3": [(24, 8), (10, 30), (40, 24)], "internvl": [(15, 30), (40, 24)], "internvl6b": [(16, 16)]}
TILED |= {"llava": [(16, 16), (23, 14)]}


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


def tiles_of(name, image, settings):
    """The tiles of an image, and the texts around them."""
    # Without normalization, tiles stay bytes.
    settings = settings | {"do_rescale": False, "do_normalize": False}
    if name == "gemma4v":
        raw = transformers.Gemma4ImageProcessorPil(**settings)(image)
        places = raw["image_position_ids"][0]
        columns, lines = places.max(0) + 1
        patches = raw["pixel_values"][0][: columns * lines].reshape(lines, columns, 16, 16, 3)
        tiles = [patches.transpose(4, 0, 2, 1, 3).reshape(3, lines * 16, columns * 16)]
        texts = ["<|image>", "<image|>"]
    elif name == "lfm2":
        raw = transformers.Lfm2VlImageProcessor(**settings, return_row_col_info=True)(image, return_tensors="pt")
        tiles = []
        for patches, (rows, columns) in zip(raw["pixel_values"], raw["spatial_shapes"].tolist()):
            tile = patches[: rows * columns].reshape(rows, columns, 16, 16, 3).permute(4, 0, 2, 1, 3)
            tiles.append(tile.reshape(3, rows * 16, columns * 16).numpy().astype(numpy.uint8))
        self = types.SimpleNamespace(image_start_token="<|image_start|>", image_end_token="<|image_end|>")
        self.image_thumbnail_token, self.image_token = "<|img_thumbnail|>", "A"
        build = transformers.Lfm2VlProcessor._build_image_tokens
        texts = build(self, raw["image_rows"][0], raw["image_cols"][0], 1, 1, True, True).split("A")
    elif name == "llava":
        tiles = transformers.LlavaImageProcessorPil(**settings, do_pad=True)(image)["pixel_values"]
        texts = ["", ""]
    elif name == "pixtral":
        raw = transformers.PixtralImageProcessorPil(**settings, do_pad=False)(image)
        self = types.SimpleNamespace(image_token="A", image_break_token="A", image_end_token="[IMG_END]")
        self.patch_size, self.spatial_merge_size = settings["patch_size"]["width"], 1
        text = transformers.PixtralProcessor.replace_image_token(self, raw, 0)
        tiles, texts = raw["pixel_values"], re.split("A+", text)
    elif name.startswith("internvl"):
        tiles = transformers.GotOcr2ImageProcessorPil(**settings, crop_to_patches=True)(image)["pixel_values"]
        texts = ["<img>"] + [""] * (len(tiles) - 1) + ["</img>"]
    else:
        raw = transformers.Idefics3ImageProcessorPil(**settings, do_pad=False, return_row_col_info=True)(image)
        tiles = raw["pixel_values"][0]
        self = types.SimpleNamespace(fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>")
        self.image_token, self.image_seq_len = "<image>", 1
        texts = transformers.Idefics3Processor.replace_image_token(self, raw, 0).split("<image>")
    return [Image.fromarray(numpy.asarray(tile).transpose(1, 2, 0)) for tile in tiles], texts


def settings_of(name, side, longest, tiles):
    """Settings of a processor, and the keys of a file that stand for them."""
    if name == "gemma4v":
        return {}, {"patch_size": 16, "image_size": 224}
    if name == "lfm2":
        return {}, {"patch_size": 16, "image_size": 256}
    if name == "llava":
        settings = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        return settings | {"image_mean": NORMAL["image_mean"]}, {}
    if name == "pixtral":
        merge = tiles[0] % 2 + 1
        settings = {"size": {"longest_edge": longest}, "patch_size": {"height": PATCH * merge, "width": PATCH * merge}}
        return settings, {"image_size": longest, "spatial_merge_size": merge}
    if name.startswith("internvl"):
        settings = {"size": {"height": side, "width": side}, "min_patches": tiles[0], "max_patches": tiles[1]}
        return settings, {"preproc_min_tiles": tiles[0], "preproc_max_tiles": tiles[1]}
    settings = {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": longest}}
    return settings, {"preproc_image_size": longest}


def normal_tiles(name, image, preprocessing):
    settings, _ = settings_of(name, 16, 48, (1, 12))
    tiles, _ = tiles_of(name, image, settings)
    return torch.stack([normal(tile, preprocessing) for tile in tiles])


def placed_patches(pixels):
    """Patches of an image with their columns and rows, as Gemma 4's processor returns them."""
    _, lines, columns = (extent // PATCH for extent in pixels.shape)
    patches = pixels.unflatten(1, (-1, PATCH)).unflatten(3, (-1, PATCH)).permute(1, 3, 2, 4, 0)
    places = torch.tensor([[x, y] for y in range(lines) for x in range(columns)])
    return patches.reshape(columns * lines, -1), places


def rows_of(model, name, image, preprocessing):
    if name in TILED:
        tiles = normal_tiles(name, image, preprocessing)
        tiles = tiles[None] if name == "idefics3" else tiles
        return torch.cat(list(model.model.get_image_features(tiles).pooler_output))
    pixels = normal(image, preprocessing)
    if name in WITH_BREAKS:
        rows = model.model.get_image_features(pixels[None], image_sizes=[pixels.shape[1:]]).pooler_output[0]
        rows = rows.unflatten(0, (-1, image.width // unit_of(name)))
        token = model.get_input_embeddings().weight[BREAK].expand(len(rows), 1, -1)
        return torch.cat([rows, token], dim=1).flatten(0, 1)[:-1]
    if name == "gemma4v":
        patches, places = placed_patches(pixels)
        return model.model.get_image_features(patches[None], places[None]).pooler_output[0]
    if name == "lfm2":
        return model.model.get_image_features(**naflex(pixels[None])).pooler_output[0]
    if name == "gemma3":
        features = model.model.get_image_features(pixels[None])
        return features.pooler_output[0]
    patches, grid = merged_patches(pixels)
    features = model.model.get_image_features(patches, grid)
    rows = torch.cat(list(features.pooler_output))
    deep = getattr(features, "deepstack_features", None) or []
    deep = [part if torch.is_tensor(part) else torch.cat(list(part)) for part in deep]
    return torch.cat([rows, *deep], dim=1)


def unit_of(name):
    """Width and height of the pixels of a row."""
    return PATCH if name == "pixtral" else 2 * PATCH


def logits_with_breaks(model, name, preprocessing):
    """The logits of a text with two images and tokens between their rows."""
    images = [normal(image_of(width, height), preprocessing) for width, height in sizes_of(name)]
    heights, widths = zip(*[image.shape[1:] for image in images])
    padded = [torch.nn.functional.pad(image, (0, max(widths) - image.shape[2], 0, max(heights) - image.shape[1])) for image in images]
    ids = [3, 7]
    for width, height in sizes_of(name):
        ids += [*[*[60] * (width // unit_of(name)), BREAK] * (height // unit_of(name))][:-1] + [13, 9]
    sizes = torch.tensor(list(zip(heights, widths)))
    logits = model(input_ids=torch.tensor([ids]), pixel_values=torch.stack(padded), image_sizes=sizes).logits
    return text_of(sizes_of(name), [60 if token == BREAK else token for token in ids], logits)


def logits_of(model, name):
    """The logits of a text with two images: the first one between tokens, the second one at the end."""
    preprocessing = MODELS[name]()[1]
    if name in TILED:
        return tiled_logits_of(model, name, preprocessing)
    if name in WITH_BREAKS:
        return logits_with_breaks(model, name, preprocessing)
    if name == "gemma4v":
        sizes = sizes_of(name)
        patches, places = zip(*[placed_patches(normal(image_of(*size), preprocessing)) for size in sizes])
        inputs = {"pixel_values": torch.stack(patches), "image_position_ids": torch.stack(places)}
        ids = [3, 7, *[60] * 6, 9, 11, 13, *[60] * 6, 5]
        tokens = torch.tensor([ids])
        return text_of(sizes, ids, model(input_ids=tokens, mm_token_type_ids=(tokens == 60).int(), **inputs).logits)
    if name == "lfm2":
        sizes = [(64, 96)] * 2
        inputs = naflex(torch.stack([normal(image_of(*size), preprocessing) for size in sizes]))
        ids = [3, 7, *[60] * 6, 9, 11, 13, *[60] * 6, 5]
        return text_of(sizes, ids, model(input_ids=torch.tensor([ids]), **inputs).logits)
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
    return text_of(sizes, ids, logits)


def tiled_logits_of(model, name, preprocessing):
    """The logits of a text with two images in tiles, with tokens between them."""
    sizes = TILED[name][:2]
    images = [normal_tiles(name, image_of(width, height), preprocessing) for width, height in sizes]
    ids = [3, 7]
    pixels = torch.cat(images)
    for index, tiles in enumerate(images):
        if name == "idefics3":
            ids += [token for at in range(len(tiles)) for token in [21, 22 + at, *[60] * 4]] + [21 + index, 9]
        else:
            ids += [21, *[60] * (16 if name == "llava" else 4) * len(tiles), 22, 9]
    logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels[None] if name == "idefics3" else pixels).logits
    return text_of(sizes, ids, logits)


def text_of(sizes, ids, logits):
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
    own = {"gemma3": [(32, 32)], "qwen25vl": [*SIZES, WINDOWED], "pixtral": [(16, 24), (28, 12)]}
    # The images of Gemma 4 have as many tokens as they may have: six.
    own |= {"lfm2": [(64, 96), (576, 32)], "gemma4v": [(36, 24), (12, 72)]}
    return (own | TILED).get(name, SIZES)


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
        text = None if name in WITHOUT_TEXT else logits_of(model, name)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        weights = pathlib.Path(folder) / "model.safetensors"
        if name.startswith("internvl"):
            rename(weights, r"^(?=vision_tower|multi_modal)", "model.")
            name_parts(pathlib.Path(folder) / "config.json", text="Qwen2ForCausalLM", vision="InternVisionModel")
        elif name not in [*WITH_BREAKS, "llava", "gemma4v"]:
            rename(weights, r"^(model\.)?vision_tower\.(?!vision_model)", "vision_tower.vision_model.")
        if name == "lfm2":
            name_parts(pathlib.Path(folder) / "config.json", text="Lfm2ForCausalLM")
        (pathlib.Path(folder) / "preprocessor_config.json").write_text(json.dumps(preprocessing))
        vocabulary = {"model": {"vocab": {str(token): token for token in range(64)}}, "added_tokens": []}
        added = {"added_tokens_decoder": {str(BREAK): {"content": "[IMG_BREAK]"}}}
        (pathlib.Path(folder) / "tokenizer_config.json").write_text(json.dumps(added))
        (pathlib.Path(folder) / "tokenizer.json").write_text(json.dumps(vocabulary))
        if text:
            converted(converter, folder, FOLDER / f"{name}-text.gguf")
        # The encoder's file has the token between rows, whose table has no prefix in published models.
        rename(weights, r"^language_model\.model\.(?=embed_tokens)", "")
        if name == "llava":
            llava_file(converter, model, preprocessing, FOLDER / f"{name}.gguf")
        else:
            converted(converter, folder, FOLDER / f"{name}.gguf", "--mmproj")
    result = json.dumps({"transformers": transformers.__version__, "cases": cases, "text": text})
    (FOLDER / f"{name}.json").write_text(result + "\n")
    print(name, [len(case["rows"]) for case in cases])


def rename(path, old, new):
    """Gives tensors the names that published models have."""
    tensors = safetensors.torch.load_file(path)
    tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, path)


def name_parts(path, **architectures):
    """Names the architectures of a model's parts, as published models do."""
    config = json.loads(path.read_text())
    for part, architecture in architectures.items():
        config[f"{part}_config"]["architectures"] = [architecture]
    path.write_text(json.dumps(config))


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


def tiled_case(name, size, side, longest, counts):
    settings, keys = settings_of(name, side, longest, counts)
    tiles, texts = tiles_of(name, image_of(*size), settings)
    keys = {"image_size": side} | keys
    hashes = [[tile.width, tile.height, fnv(tile.tobytes())] for tile in tiles]
    return {"name": {"llava": "mlp"}.get(name, name), "keys": keys, "size": size, "texts": texts, "tiles": hashes}


def tiled():
    """Sizes, texts and hashes of the tiles of images."""
    rng = random.Random(2)
    cases = []
    for index, name in enumerate(["idefics3", "internvl", "pixtral", "llava", "lfm2", "gemma4v"] * 20):
        # LFM2 has tiles for images of over 724 x 724 pixels.
        exponents = (9, 10.5) if name == "lfm2" and index % 4 == 0 else (2, 8)
        size = [int(2 ** rng.uniform(*exponents)) for _ in range(2)]
        side, longest = 16 * rng.randint(1, 3), rng.randint(30, 150)
        counts = (rng.randint(1, 4), rng.randint(4, 14))
        cases.append((name, size, side, longest, counts))
    # An image above the maximum of Idefics3.
    cases.append(("idefics3", [60, 2], 256, 5000, None))
    # Squares that fill less than a half of larger grids, and more.
    cases += [("internvl", [extent, extent], 16, 0, (1, 9)) for extent in (16, 22, 23, 33, 34, 40)]
    cases = [tiled_case(*case) for case in cases]
    (FOLDER / "tiled.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


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
    parser.add_argument("--only", choices=[*MODELS, "tiled"])
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if args.only == "tiled":
        return tiled()
    if not args.only:
        resized()
        tiled()
        decoded()
    for name in [args.only] if args.only else MODELS:
        fixture(name, args.converter)


if __name__ == "__main__":
    main()
