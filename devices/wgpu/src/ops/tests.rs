//! Every shader that the conformance suite needs is valid WGSL. This needs no GPU.

use super::launches;
use crate::plan::{Capacity, Launch};
use crate::shader::Shader;
use samite_testing::cases;
use std::collections::BTreeSet;

/// What desktop adapters have.
fn capacity(subgroups: bool, binding: usize) -> Capacity {
    Capacity {
        binding,
        alignment: 256,
        operands: 8,
        subgroups,
        groups: 65535,
        overlaps: true,
    }
}

fn all_launches(capacity: &Capacity) -> Vec<Launch> {
    let mut all = Vec::new();
    for case in cases() {
        for id in case
            .graph
            .ids()
            .filter(|&id| case.graph.tensor(id).is_computed())
        {
            all.extend(launches(case.graph.node(id), capacity).unwrap_or_default());
        }
    }
    all
}

fn validate(shader: &Shader) -> Result<(), String> {
    let source = shader.source();
    let module = naga::front::wgsl::parse_str(&source)
        .map_err(|error| error.emit_to_string_with_path(&source, &shader.name()))?;
    let mut validator = naga::valid::Validator::new(
        naga::valid::ValidationFlags::all(),
        naga::valid::Capabilities::SUBGROUP | naga::valid::Capabilities::SHADER_FLOAT16_IN_FLOAT32,
    );
    validator
        .validate(&module)
        .map_err(|error| error.emit_to_string_with_path(&source, &shader.name()))?;
    Ok(())
}

#[test]
fn every_shader_is_valid() {
    let mut shaders = BTreeSet::new();
    for subgroups in [false, true] {
        let launches = all_launches(&capacity(subgroups, 1 << 30));
        shaders.extend(launches.into_iter().map(|launch| launch.shader));
    }
    assert!(shaders.len() > 300, "{}", shaders.len());
    // For other judges: browsers have compilers of their own.
    if let Some(path) = std::env::var_os("SAMITE_WRITE_SHADERS") {
        let for_browsers = shaders
            .iter()
            .filter(|shader| shader.subgroups != Some(true));
        let sources: Vec<_> = for_browsers
            .map(|shader| (shader.name(), shader.source()))
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
    shaders.retain(|shader| shader.operands.len() > 1);
    let mut refused = 0;
    for shader in shaders {
        let count = shader.operands.len() as u8;
        // Result and first source; all; the last two.
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
fn parts_fit_into_bindings() {
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
