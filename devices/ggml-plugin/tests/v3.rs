//! The plugin in a host of interface version 3.

mod common;

#[test]
fn the_plugin_works_in_a_host_of_version_3() {
    common::exercise("0.26.0", samite_ggml::abi::Version::V26);
}
