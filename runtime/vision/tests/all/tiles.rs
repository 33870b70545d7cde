//! Images are divided into tiles as Hugging Face's processors do it: fixtures of `oracle.py`.

use crate::{expectations, fnv, image};
use samite_gguf::Metadata;
use samite_vision::VisionSpec;
use serde_json::Value;

/// The description of an encoder with these keys.
fn spec(case: &Value) -> VisionSpec {
    let mut metadata = Metadata::new();
    let mut set = |key: &str, value: samite_gguf::Value| metadata.set(key, value).unwrap();
    set("general.architecture", "clip".into());
    set("clip.projector_type", case["name"].as_str().unwrap().into());
    set("clip.vision.attention.layer_norm_epsilon", 1e-6f32.into());
    let mean = vec![0.481_454_66_f32, 0.457_827_5, 0.408_210_73];
    set("clip.vision.image_mean", mean.into());
    set("clip.vision.image_std", vec![0.5f32; 3].into());
    for (key, value) in [
        ("embedding_length", 64),
        ("attention.head_count", 2),
        ("block_count", 1),
        ("patch_size", 4),
        ("projection_dim", 32),
    ] {
        set(&format!("clip.vision.{key}"), value.into());
    }
    for (key, value) in case["keys"].as_object().unwrap() {
        let value = u32::try_from(value.as_u64().unwrap()).unwrap();
        set(&format!("clip.vision.{key}"), value.into());
    }
    VisionSpec::from_metadata(&metadata, [None; 2]).unwrap()
}

#[test]
fn tiles_equal_those_of_the_processor() {
    let cases = expectations("tiled.json");
    for case in cases.as_array().unwrap() {
        let extent = |at: usize| case["size"][at].as_u64().unwrap() as usize;
        let image = image(extent(0), extent(1));
        let spec = spec(case);
        let plan = spec.tiles(image.width(), image.height());
        let tiles = plan.cut(&image).unwrap();
        let sizes = tiles.iter().map(|tile| [tile.width(), tile.height()]);
        assert!(sizes.eq(plan.sizes()), "{case}");
        let found = tiles
            .iter()
            .map(|tile| serde_json::json!([tile.width(), tile.height(), fnv(tile.pixels())]));
        let found: Vec<_> = found.collect();
        assert_eq!(Value::from(found), case["tiles"], "{case}");
        let texts = spec.projector.texts(plan.grid());
        assert_eq!(Value::from(texts), case["texts"], "{case}");
    }
}
