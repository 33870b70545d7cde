//! Nodes as few launches and separately.

use super::{TestCard, card};
use samite_core::{DType, TensorId};
use samite_cuda::CudaDevice;
use samite_testing::{
    FusionCase, LayerKind, Rng, RotationKind, layer_case, layer_kind, rotation_case, rotation_kind,
};

/// Cases of each test.
const CASES: u64 = 16;

/// Largest error of 8-bit columns, after two products, and of halves.
const LAYER_LIMIT: f64 = 3e-4;
/// Largest difference between layers as few launches and separately: codes of columns may round to
/// a neighbour.
const APART_LIMIT: f64 = 1e-5;

fn launch_count(card: &TestCard, case: &FusionCase) -> Option<usize> {
    let device = card.device.as_any().downcast_ref::<CudaDevice>().unwrap();
    device.launch_count(&case.graph, &case.nodes)
}

/// Returns whether the operations before attention are one launch.
fn is_one_launch(kind: RotationKind) -> bool {
    let [q, k] = kind.has_norms;
    kind.has_caches && q == k && !kind.cache.is_quantized()
}

#[test]
fn rotations_and_cache_writes_match_the_reference() {
    let cards = [0, 1, 2, 3].map(card);
    let mut fused = 0;
    for seed in 0..CASES {
        let card = &cards[seed as usize % cards.len()];
        let kind = rotation_kind(&mut Rng::new(seed));
        let case = rotation_case(kind);
        let launches = launch_count(card, &case).unwrap();
        assert_eq!(launches == 1, is_one_launch(kind), "seed {seed}: {kind:?}");
        assert!(launches <= 4, "seed {seed}: {launches}, {kind:?}");
        fused += usize::from(launches == 1);
        let whole = case.run(&card.device, seed, false, &[&case.nodes]);
        let in_place = case.run(&card.device, seed, true, &[&case.nodes]);
        assert!(in_place == whole, "in place, seed {seed}: {kind:?}");
        let apart: Vec<&[TensorId]> = case.nodes.chunks(1).collect();
        let apart = case.run(&card.device, seed, false, &apart);
        let limit = kind.limit();
        let difference = case.difference(&whole, &apart);
        let error = case.error(seed, &whole);
        assert!(difference <= limit, "{difference:e}, seed {seed}: {kind:?}");
        assert!(error <= limit, "{error:e}, seed {seed}: {kind:?}");
    }
    assert!(fused > 3, "{fused}");
}

/// Returns the launches of a layer in parts of one node, less those of the whole.
fn saved_launches(card: &TestCard, case: &FusionCase) -> usize {
    let device = card.device.as_any().downcast_ref::<CudaDevice>().unwrap();
    let apart = case.nodes.iter();
    let apart = apart.map(|&id| device.launch_count(&case.graph, &[id]).unwrap());
    apart.sum::<usize>() - launch_count(card, case).unwrap()
}

/// Returns the error of a layer to the reference, or to separate launches if it is larger than
/// their limit.
fn layer_error(card: &TestCard, seed: u64, case: &FusionCase) -> f64 {
    let whole = case.run(&card.device, seed, false, &[&case.nodes]);
    let in_place = case.run(&card.device, seed, true, &[&case.nodes]);
    let apart: Vec<&[TensorId]> = case.nodes.chunks(1).collect();
    let apart = case.run(&card.device, seed, false, &apart);
    let difference = case.difference(&whole, &apart);
    let is_near = in_place == whole && difference <= APART_LIMIT;
    if is_near {
        case.error(seed, &whole)
    } else {
        f64::INFINITY
    }
}

#[test]
fn layers_match_the_reference() {
    let cards = [0, 1, 2, 3].map(card);
    for seed in 0..CASES {
        let card = &cards[seed as usize % cards.len()];
        let kind = layer_kind(&mut Rng::new(seed));
        let case = layer_case(kind);
        // A norm is fused with its multiplication, an addition with the norm.
        let saved = saved_launches(card, &case);
        assert!(
            saved > usize::from(kind.has_sum),
            "seed {seed}: {saved}, {kind:?}"
        );
        let error = layer_error(card, seed, &case);
        assert!(error <= LAYER_LIMIT, "{error:e}, seed {seed}: {kind:?}");
    }
}

#[test]
fn a_token_needs_few_launches() {
    let kind = LayerKind {
        weights: DType::Q4_0,
        tokens: 1,
        sizes: [512, 1024],
        has_sum: true,
        products: 1,
        attention: [4, 2, 700],
        ..layer_kind(&mut Rng::new(1))
    };
    // The norm of a sum, three products, the gated unit and its product. Attention in parts, their
    // sum, and the product.
    assert_eq!(launch_count(&card(1), &layer_case(kind)), Some(7));
}
