import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from helpers import plotting


@pytest.fixture
def ax():
    return Figure().subplots()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def legend(ax):
    return [] if ax.get_legend() is None else [t.get_text() for t in ax.get_legend().get_texts()]


def test_no_axes_given_makes_a_figure_that_pyplot_does_not_hold(rng):
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    ax = plotting.plot_traces(None, rng.normal(size=10), ylabel="x")
    assert ax.figure.axes == [ax]
    assert pyplot.get_fignums() == before


def test_curves_by_round_hold_the_values_and_differ_without_colour(ax):
    curves = {"a": np.array([3.0, 2.0]), "b": np.array([1.0, 0.0])}
    plotting.plot_by_round(ax, curves, ylabel="loss")
    for line, values in zip(ax.lines, curves.values(), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), values)
    assert len({(line.get_linestyle(), line.get_marker()) for line in ax.lines}) == 2
    assert legend(ax) == ["a", "b"]


def test_label_shares_are_shares_of_each_client(ax):
    plotting.plot_label_shares(ax, [np.array([0, 0, 1, 2]), np.array([2])], num_classes=3)
    shares = ax.collections[0].get_array().reshape(3, 2)
    np.testing.assert_allclose(shares, [[0.5, 0], [0.25, 0], [0.25, 1]])


def test_traces_draw_a_line_a_chain_and_the_truth(ax, rng):
    draws = rng.normal(size=(20, 3))
    plotting.plot_traces(ax, draws, ylabel="x", truth=0.5)
    for chain in range(3):
        np.testing.assert_array_equal(ax.lines[chain].get_ydata(), draws[:, chain])
    assert set(ax.lines[3].get_ydata()) == {0.5}
    assert legend(ax) == ["chain 0", "chain 1", "chain 2", "truth"]


def test_chains_differ_in_marker_as_well_as_colour(ax, rng):
    plotting.plot_traces(ax, rng.normal(size=(20, 4)), ylabel="x")
    assert len({line.get_marker() for line in ax.lines}) == 4


def test_the_legend_of_chains_hides_none_of_their_lines(rng):
    ax = plotting.plot_traces(None, rng.normal(size=(50, 3)), ylabel="x", truth=0.5)
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().y0 >= ax.get_window_extent().y1


def test_many_chains_get_no_legend_entry_each(ax, rng):
    plotting.plot_traces(ax, rng.normal(size=(20, 16)), ylabel="x", truth=0.0)
    assert legend(ax) == ["truth"]


def test_warmup_is_shaded_up_to_its_last_step(ax):
    plotting.plot_warmup_and_draws(ax, np.zeros(5), np.ones(7), ylabel="step size")
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), [0] * 5 + [1] * 7)
    left, right = ax.patches[0].get_extents().transformed(ax.transData.inverted()).intervalx
    assert (left, right) == pytest.approx((-0.5, 4.5))


def test_warmup_and_draws_of_other_runs_are_refused(ax):
    with pytest.raises(ValueError, match="2 chains and draws have 3"):
        plotting.plot_warmup_and_draws(ax, np.zeros((5, 2)), np.zeros((5, 3)), ylabel="x")


def test_scatter_draws_the_points_of_each_chain(ax, rng):
    draws = rng.normal(size=(10, 2, 2))
    plotting.plot_scatter(ax, draws)
    np.testing.assert_array_equal(ax.lines[1].get_xydata(), draws[:, 1])


def test_scatter_refuses_other_dimensions(ax):
    with pytest.raises(ValueError, match=r"\(10, 2, 3\).*\[num_draws, num_chains, 2\]"):
        plotting.plot_scatter(ax, np.zeros((10, 2, 3)))


def test_histogram_is_a_density(ax, rng):
    plotting.plot_histogram(ax, {"x": rng.normal(size=500)}, xlabel="x")
    data = ax.patches[0].get_data()
    assert (data.values * np.diff(data.edges)).sum() == pytest.approx(1)


def test_bars_are_as_long_as_the_values_and_start_on_top(ax):
    plotting.plot_bars(ax, ["a", "b"], np.array([3, 1]), xlabel="times")
    assert [bar.get_width() for bar in ax.patches] == [3, 1]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert ax.yaxis_inverted()


def test_a_bar_without_a_name_is_refused(ax):
    with pytest.raises(ValueError, match="need as many names, given 1"):
        plotting.plot_bars(ax, ["a"], np.array([3, 1]), xlabel="times")


def test_reliability_by_bin_equals_hand_counts(ax):
    confidences = np.array([0.62, 0.64, 0.93, 0.95, 1.0])
    correct = np.array([True, False, True, True, False])
    plotting.plot_reliability(ax, confidences, correct)
    np.testing.assert_allclose(ax.lines[1].get_xydata(), [[0.63, 0.5], [0.96, 2 / 3]])
    (count_ax,) = (other for other in ax.figure.axes if other is not ax)
    counts = count_ax.patches[0].get_data().values
    np.testing.assert_array_equal(counts, [0, 0, 0, 0, 0, 0, 2, 0, 0, 3])


def test_reliability_refuses_logits(ax):
    with pytest.raises(ValueError, match="not logits"):
        plotting.plot_reliability(ax, np.array([3.0]), np.array([True]))


def test_images_lie_in_rows_under_one_scale_with_captions(ax):
    images = np.arange(3 * 4).reshape(3, 2, 2)
    plotting.plot_images(ax, images, ["a", "b", "c"], num_columns=2)
    assert [text.get_text() for text in ax.texts] == ["a", "b", "c"]
    assert {image.get_clim() for image in ax.images} == {(0, 11)}
    lefts = [image.get_extent()[0] for image in ax.images]
    assert lefts[0] == lefts[2] < lefts[1]


def test_a_caption_for_each_image(ax):
    with pytest.raises(ValueError, match="1 captions for 2 images"):
        plotting.plot_images(ax, np.zeros((2, 3, 3)), ["a"])


def test_layout_on_one_device_is_one_block(ax):
    import jax

    array = jax.device_put(np.zeros((4, 3)), jax.devices()[0])
    plotting.plot_device_layout(ax, array)
    (block,) = ax.patches
    assert (block.get_width(), block.get_height()) == (3, 4)
    assert [text.get_text() for text in ax.texts] == ["0"]


LAYOUTS = """
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from helpers import plotting

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
for array in (
    jax.pmap(lambda x: x)(np.zeros((4, 6, 2))),
    jax.device_put(np.zeros((8, 6)), NamedSharding(mesh, PartitionSpec("a", "b"))),
    jax.device_put(np.zeros(8), NamedSharding(mesh, PartitionSpec("b"))),
    jax.device_put(np.zeros(()), NamedSharding(mesh, PartitionSpec())),
):
    ax = plotting.plot_device_layout(Figure().subplots(), array)
    blocks = [
        [text.get_text(), *block.get_xy(), block.get_width(), block.get_height()]
        for text, block in zip(ax.texts, ax.patches, strict=True)
    ]
    print(sorted(blocks))
    print(len({(block.get_hatch(), block.get_facecolor()) for block in ax.patches}))
"""


def test_layouts_on_four_devices():
    result = subprocess.run(
        [sys.executable, "-c", LAYOUTS],
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
            "MPLBACKEND": matplotlib.get_backend(),
        },
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert result.stdout.splitlines() == [
        "[['0', 0, 0, 6, 1], ['1', 0, 1, 6, 1], ['2', 0, 2, 6, 1], ['3', 0, 3, 6, 1]]",
        "4",
        "[['0', 0, 0, 3, 4], ['1', 3, 0, 3, 4], ['2', 0, 4, 3, 4], ['3', 3, 4, 3, 4]]",
        "4",
        "[['0, 2', 0, 0, 1, 4], ['1, 3', 0, 4, 1, 4]]",
        "2",
        "[['all devices', 0, 0, 1, 1]]",
        "1",
    ]
