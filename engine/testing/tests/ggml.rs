//! Checks that upstream's plugins fulfil the contract, as far as they can.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // test helpers may unwrap

use samite_core::Backend;
use samite_ggml::{GgmlBackend, GgmlOptions};
use samite_testing::check_contract;

#[test]
fn plugins_fulfil_the_contract() {
    let mut folders = Vec::new();
    for variable in ["SAMITE_TEST_GGML_PLUGINS", "SAMITE_TEST_GGML_VULKAN"] {
        match std::env::var_os(variable) {
            Some(folder) => folders.push(folder),
            None => println!("skipped: {variable} does not name a folder with plugins of ggml"),
        }
    }
    for folder in folders {
        let mut options = GgmlOptions::default();
        options.paths = vec![folder.into()];
        let backend = GgmlBackend::find(&options);
        assert!(!backend.devices().is_empty(), "{:?}", backend.rejected());
        for device in backend.devices() {
            let report = check_contract(device);
            assert_eq!(report.failures(), [], "{device:?}\n{report}");
            assert!(report.passed() >= 10, "{device:?}\n{report}");
        }
    }
}
