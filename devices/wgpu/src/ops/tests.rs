//! Checks that every shader that the conformance suite needs is valid WGSL. Needs no GPU.

use super::launches_of;
use crate::emulated::without_matrices;
use crate::plan::{Capacity, Launch, MAX_OPERANDS};
use crate::shader::{MATRIX_KERNELS, Shader, expand};
use crate::template::Values;
use crate::tuning::Tuning;
use samite_core::{DType, Graph, Rope, RopeMode};
use samite_fusion::{Memory, OperandFacts, launch_list};
use samite_quant::is_packable;
use samite_testing::cases;
use std::collections::BTreeSet;

/// Returns the capacity of a typical desktop adapter.
pub fn capacity(subgroups: bool, binding: usize) -> Capacity {
    Capacity {
        binding,
        alignment: 256,
        operands: MAX_OPERANDS,
        subgroups,
        groups: 65535,
        overlaps: true,
        matrices: subgroups,
        attends_by_matrices: subgroups,
        memory: 48 << 10,
        lanes: None,
        height: None,
        tuning: Tuning::default(),
    }
}

/// Returns the launches of all nodes of a graph.
fn launches(graph: &Graph, capacity: &Capacity, memory: Memory<'_>) -> Vec<Launch> {
    let nodes: Vec<_> = graph.ids().collect();
    let list = launch_list(graph, &nodes, *capacity, memory);
    let list = list.unwrap_or_else(|(_, reason)| panic!("{reason}"));
    list.launches.into_iter().map(|step| step.launch).collect()
}

fn all_launches(capacity: &Capacity) -> Vec<Launch> {
    let mut all = Vec::new();
    for case in cases() {
        for id in case
            .graph
            .ids()
            .filter(|&id| case.graph.tensor(id).is_computed())
        {
            let node = case.graph.node(id);
            for (packed, aligned) in [(false, false), (false, true), (true, true)] {
                if !packed || node.source(0).is_some_and(is_packable) {
                    let known = OperandFacts { packed, aligned };
                    all.extend(launches_of(node, capacity, known).unwrap_or_default());
                }
            }
            if let Ok(list) = launch_list(&case.graph, &[id], *capacity, Memory::AllPacked) {
                all.extend(list.launches.into_iter().map(|step| step.launch));
            }
        }
    }
    all.extend(fused(capacity));
    all.extend(large(capacity));
    all
}

/// Returns launches of nodes that are larger than those of the conformance suite.
fn large(capacity: &Capacity) -> Vec<Launch> {
    let mut g = Graph::new();
    let w = g.leaf("w", DType::Q4_0, [256, 4096, 1, 1]).unwrap();
    let x = g.input("x", DType::F32, [256, 1024, 1, 1]).unwrap();
    g.mul_mat(w, x).unwrap();
    let row = g.input("row", DType::F32, [8192, 1, 1, 1]).unwrap();
    g.top_k(row, 40).unwrap();
    launches(&g, capacity, Memory::AllPacked)
}

/// Returns launches of several nodes, as in a layer of a model.
fn fused(capacity: &Capacity) -> Vec<Launch> {
    let mut all = Vec::new();
    for (dtype, tokens, summed) in [
        (DType::Q4_0, 1, false),
        (DType::Q8_0, 3, true),
        (DType::Q6_K, 8, true),
    ] {
        let mut g = Graph::new();
        let x = g.input("x", DType::F32, [512, tokens, 1, 1]).unwrap();
        let z = g.input("z", DType::F32, [512, tokens, 1, 1]).unwrap();
        let scale = g.leaf("scale", DType::F32, [512, 1, 1, 1]).unwrap();
        let mut weights = |name| g.leaf(name, dtype, [512, 512, 1, 1]).unwrap();
        let [w1, w2, w3] = ["w1", "w2", "w3"].map(&mut weights);
        let x = if summed { g.add(x, z).unwrap() } else { x };
        let norm = g.rms_norm(x, 1e-5).unwrap();
        let norm = g.mul(norm, scale).unwrap();
        let [gate, up] = [w1, w2].map(|w| g.mul_mat(w, norm).unwrap());
        let gated = g.glu_split(gate, up, samite_core::Glu::Swiglu).unwrap();
        let down = g.mul_mat(w3, gated).unwrap();
        let y = g.add(down, x).unwrap();
        g.set_output(y);
        let steps = launches(&g, capacity, Memory::AllPacked);
        let kernels: Vec<_> = steps.iter().map(|launch| launch.shader.kernel).collect();
        if capacity.binding > 1 << 20 {
            let expected = [
                "scaled_norm",
                "mul_mat_q8",
                "gated_q8",
                "mul_mat_q8",
                "elementwise",
            ];
            assert_eq!(kernels, expected);
        }
        all.extend(steps);
    }
    let long = ["flash_attn", "flash_attn_combine", "mul_mat_q8"];
    for (tokens, keys, dtype, expected) in [
        (3, 40, DType::F16, &["flash_attn", "mul_mat_q8"][..]),
        (3, 40, DType::F32, &["flash_attn", "mul_mat_q8"]),
        (1, 1100, DType::F16, &long),
        (1, 1100, DType::F32, &long),
    ] {
        if capacity.binding > 1 << 20 {
            let attention = attention(tokens, keys, dtype, capacity);
            let kernels = attention.iter().map(|launch| launch.shader.kernel);
            assert_eq!(kernels.collect::<Vec<_>>(), expected);
            all.extend(attention);
        }
    }
    let few = Capacity {
        operands: 8,
        ..*capacity
    };
    let parts = ["norm_rope", "set_rows", "set_rows", "norm_rope"];
    for (capacity, has_norms, cache, expected) in [
        (capacity, false, DType::F16, &["rope_store"][..]),
        (capacity, true, DType::F16, &["norm_rope"]),
        (capacity, false, DType::Q8_0, &["norm_rope"]),
        (capacity, true, DType::Q5_1, &["norm_rope"]),
        (&few, false, DType::F16, &["rope_store"]),
        (&few, true, DType::F16, &parts),
    ] {
        let before_attention = before_attention(capacity, has_norms, cache);
        let kernels = before_attention.iter().map(|launch| launch.shader.kernel);
        assert_eq!(kernels.collect::<Vec<_>>(), expected);
        all.extend(before_attention);
    }
    all
}

/// Returns the launches of attention and the product after it.
fn attention(tokens: usize, keys: usize, dtype: DType, capacity: &Capacity) -> Vec<Launch> {
    let mut g = Graph::new();
    let input = |g: &mut Graph, dtype, shape| g.input("", dtype, shape).unwrap();
    let q = input(&mut g, DType::F32, [64, tokens, 4, 1]);
    let [k, v] = [0, 1].map(|_| input(&mut g, dtype, [64, keys, 2, 1]));
    let mask = input(&mut g, DType::F16, [keys, tokens, 1, 1]);
    let w = g.leaf("w", DType::Q4_0, [256, 96, 1, 1]).unwrap();
    let op = samite_core::Op::FlashAttn {
        scale: 0.125,
        max_bias: 0.0,
        softcap: 0.0,
        precision: samite_core::Precision::F32,
    };
    let y = g
        .push(op, &[Some(q), Some(k), Some(v), Some(mask)])
        .unwrap();
    let columns = g.reshape(y, [256, tokens, 1, 1]).unwrap();
    let y = g.mul_mat(w, columns).unwrap();
    g.set_output(y);
    launches(&g, capacity, Memory::AllPacked)
}

/// Returns the launches of the rotations and cache writes of one layer, with four query heads and
/// two key heads of length 32 for three tokens, with or without QK norms.
fn before_attention(capacity: &Capacity, has_norms: bool, cache: DType) -> Vec<Launch> {
    let mut g = Graph::new();
    let input = |g: &mut Graph, dtype, shape| g.input("", dtype, shape).unwrap();
    let positions = input(&mut g, DType::I32, [3, 1, 1, 1]);
    let cells = input(&mut g, DType::I64, [3, 1, 1, 1]);
    let [q, k] = [4, 2].map(|heads| input(&mut g, DType::F32, [32, heads, 3, 1]));
    let v = input(&mut g, DType::F32, [64, 3, 1, 1]);
    let caches = [0, 1].map(|_| g.leaf("cache", cache, [64, 40, 1, 1]).unwrap());
    let rope = Rope::new(32, RopeMode::Normal, 10_000.0);
    let factor = g.leaf("factor", DType::F32, [32, 1, 1, 1]).unwrap();
    let normed = |g: &mut Graph, x| {
        if has_norms {
            let x = g.rms_norm(x, 1e-6).unwrap();
            g.mul(x, factor).unwrap()
        } else {
            x
        }
    };
    let k = normed(&mut g, k);
    let k = g.rope(k, positions, None, rope).unwrap();
    let rows = g.reshape(k, [64, 3, 1, 1]).unwrap();
    g.set_rows(rows, cells, caches[0]).unwrap();
    g.set_rows(v, cells, caches[1]).unwrap();
    let q = normed(&mut g, q);
    let q = g.rope(q, positions, None, rope).unwrap();
    g.set_output(q);
    launches(&g, capacity, Memory::Stored)
}

fn validate(shader: &Shader) -> Result<(), String> {
    validate_source(&shader.name(), shader.source())
}

fn validate_source(name: &str, source: samite_core::Result<String>) -> Result<(), String> {
    let source = source.map_err(|error| error.to_string())?;
    let module = naga::front::wgsl::parse_str(&source)
        .map_err(|error| error.emit_to_string_with_path(&source, name))?;
    let mut validator = naga::valid::Validator::new(
        naga::valid::ValidationFlags::all(),
        naga::valid::Capabilities::SUBGROUP
            | naga::valid::Capabilities::SHADER_FLOAT16_IN_FLOAT32
            | naga::valid::Capabilities::SHADER_FLOAT16
            | naga::valid::Capabilities::COOPERATIVE_MATRIX,
    );
    validator
        .validate(&module)
        .map_err(|error| error.emit_to_string_with_path(&source, name))?;
    Ok(())
}

#[test]
fn templates_without_launches_are_valid() {
    validate_source("limits", expand("limits", "{{>limits}}", &Values::new())).unwrap();
    let launches = all_launches(&capacity(true, 1 << 30));
    let shaders: BTreeSet<_> = launches.into_iter().map(|launch| launch.shader).collect();
    let mut emulated = 0;
    for shader in shaders {
        if MATRIX_KERNELS.contains(&shader.kernel) {
            let source = without_matrices(shader.kernel, shader.source().unwrap());
            validate_source(&shader.name(), source).unwrap();
            emulated += 1;
        }
    }
    assert!(emulated > 10, "{emulated}");
}

#[test]
fn every_shader_is_valid() {
    let mut shaders = BTreeSet::new();
    for subgroups in [false, true] {
        let launches = all_launches(&capacity(subgroups, 1 << 30));
        shaders.extend(launches.into_iter().map(|launch| launch.shader));
    }
    assert!(shaders.len() > 300, "{}", shaders.len());
    // Write the shaders for other validators, because browsers have their own compilers.
    if let Some(path) = std::env::var_os("SAMITE_WRITE_SHADERS") {
        let for_browsers = shaders
            .iter()
            .filter(|shader| shader.subgroups != Some(true));
        let sources: Vec<_> = for_browsers
            .map(|shader| (shader.name(), shader.source().unwrap()))
            .collect();
        std::fs::write(path, serde_json::to_string(&sources).unwrap()).unwrap();
    }
    let mut wrong = 0;
    for shader in &shaders {
        if let Err(error) = validate(shader) {
            wrong += 1;
            if wrong <= 5 {
                println!("{shader:?}\n{error}");
            }
        }
    }
    assert_eq!(wrong, 0, "of {}", shaders.len());
}

#[test]
fn operands_that_share_a_binding_are_valid() {
    let launches = all_launches(&capacity(false, 1 << 30));
    let mut shaders: BTreeSet<Shader> = launches.into_iter().map(|launch| launch.shader).collect();
    // Packed weights and scratch memory do not overlap other operands.
    shaders.retain(|shader| {
        let mut operands = shader.operands.iter();
        shader.operands.len() > 1 && !operands.any(|(_, _, access)| access.is_wide())
    });
    let mut refused = 0;
    for shader in shaders {
        let count = shader.operands.len() as u8;
        // Result and first source share one binding; all share one; the last two share one.
        let bindings: [Vec<u8>; 3] = [
            (0..count).map(|number| number.saturating_sub(1)).collect(),
            vec![0; count.into()],
            (0..count).map(|number| number.min(count - 2)).collect(),
        ];
        for bindings in bindings {
            let shader = Shader {
                bindings,
                ..shader.clone()
            };
            if shader.can_share() {
                validate(&shader).unwrap();
                assert!(shader.binding_count() < shader.operands.len());
            } else {
                refused += 1;
            }
        }
    }
    assert!(refused < 20, "{refused}");
}

#[test]
fn split_operands_fit_into_bindings() {
    let small = capacity(false, 64 << 10);
    let all = all_launches(&small);
    assert!(
        all.iter()
            .any(|launch| launch.operands.iter().any(|operand| operand.first > 0))
    );
    for launch in all {
        for operand in &launch.operands {
            assert!(operand.bytes() + 260 <= small.binding, "{launch:?}");
        }
        launch.groups(&small).unwrap();
    }
}

/// Rows of cooperative matrices in workgroup memory must begin at multiples of 16 bytes. A driver
/// may place variables in any order, each at a multiple of its own alignment, which may be less.
#[test]
fn workgroup_memory_of_matrices_is_aligned() {
    let launches = all_launches(&capacity(true, 1 << 30));
    let shaders: BTreeSet<_> = launches.into_iter().map(|launch| launch.shader).collect();
    let mut kernels = BTreeSet::new();
    for shader in shaders {
        if !MATRIX_KERNELS.contains(&shader.kernel) {
            continue;
        }
        kernels.insert(shader.kernel);
        let module = naga::front::wgsl::parse_str(&shader.source().unwrap()).unwrap();
        let variables = module.global_variables.iter().map(|(_, variable)| variable);
        for variable in variables.filter(|v| v.space == naga::AddressSpace::WorkGroup) {
            let bytes = module.types[variable.ty].inner.size(module.to_ctx());
            assert_eq!(bytes % 16, 0, "{:?} of {}", variable.name, shader.name());
        }
    }
    assert_eq!(kernels.len(), MATRIX_KERNELS.len());
}

/// The grids of IQ types need a binding of their own, which an adapter must have.
#[test]
fn codebook_grids_count_towards_the_binding_limit() {
    let mut g = Graph::new();
    let x = g.input("x", DType::F32, [256, 1, 1, 1]).unwrap();
    for (dtype, operands) in [(DType::Q4_0, 3), (DType::IQ2_XS, 4)] {
        let w = g.leaf("w", dtype, [256, 8, 1, 1]).unwrap();
        let y = g.mul_mat(w, x).unwrap();
        for few in [operands, operands - 1] {
            let capacity = Capacity {
                operands: few,
                ..capacity(false, 1 << 30)
            };
            let launches = launches_of(g.node(y), &capacity, OperandFacts::default());
            assert_eq!(launches.is_ok(), few == operands, "{dtype}, {few}");
        }
    }
}
