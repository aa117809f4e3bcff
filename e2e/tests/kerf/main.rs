//! Kerf at work: pods come and go, GPUs reshape. Nearly all tests share one cluster.

mod drain;
mod policy;
mod ready;
mod shapes;
mod shared;
mod story;
mod unmanaged;
