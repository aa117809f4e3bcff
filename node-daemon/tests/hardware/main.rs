//! The daemon's hardware half against the simulated driver: specs go in, instances come out.
//!
//! The API server is left out: its part is played by setting [`NodeState::spec`]. Needs root (device nodes).

mod crash;
mod faults;
mod life;
mod node;
mod shares;
