//! The operator against a real API server, kube-scheduler and kube-controller-manager; nodes and their daemons are
//! played by the tests.

mod control_plane;
mod played;
