//! The plugin in a host of ggml 0.26. A process has one host, so each version has a program.

mod common;

#[test]
fn the_plugin_works_in_a_host_of_0_26() {
    common::exercise("0.26.0", samite_ggml::abi::Version::V26);
}
