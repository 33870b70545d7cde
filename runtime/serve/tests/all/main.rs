//! The server's tests over sockets, in one program.

#![allow(clippy::unwrap_used)] // test helpers may unwrap

mod common;
mod costs;
mod engine;
mod forms;
mod hostile;
mod http;
mod images;
mod keys;
mod kv_transfer;
mod library;
mod loops;
mod models;
mod openapi;
mod parrot;
mod streams;
mod templates;
mod tls;
mod tools;
