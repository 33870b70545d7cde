//! The plugin in a host of interface version 2.

mod common;

#[test]
fn the_plugin_works_in_a_host_of_version_2() {
    common::exercise("0.25.1", samite_ggml::abi::Version::V25);
}
