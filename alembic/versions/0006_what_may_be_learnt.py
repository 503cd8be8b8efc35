"""Measurements say whose they are, whether they are believed and shared; calibrations what they
were made from and whether they are in use; what pricing a run found is kept

Revision: 0006, after 0005.
"""

import sqlalchemy as sa

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def columns() -> dict[str, list[sa.Column]]:
    """New columns by table. Rows of before are shared, of an owner that nobody wrote down."""
    return {
        "measurements": [
            sa.Column("trainer", sa.Text(), nullable=False, server_default=""),
            sa.Column("shared", sa.Boolean(), nullable=False, server_default=sa.true()),
            sa.Column("refused", sa.Text(), nullable=True),
        ],
        "calibrations": [
            sa.Column("owner", sa.Text(), nullable=False, server_default=""),
            sa.Column("built_from", sa.String(64), nullable=True),
            sa.Column("superseded_at", sa.DateTime(timezone=True), nullable=True),
        ],
    }


def upgrade() -> None:
    for table, added in columns().items():
        for column in added:
            op.add_column(table, column)
    _fill_trainers()
    op.execute(
        "UPDATE calibrations SET superseded_at = created_at WHERE EXISTS (SELECT 1 FROM "
        "calibrations newer WHERE newer.trainer = calibrations.trainer AND newer.gpu = "
        "calibrations.gpu AND newer.created_at > calibrations.created_at)"
    )
    op.create_index(
        "ix_measurements_learning", "measurements", ["gpu", "trainer", "created_at", "id"]
    )
    op.create_table(
        "priced_runs",
        sa.Column("measurement_id", sa.String(64), nullable=False),
        sa.Column("basis", sa.Text(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["measurement_id"],
            ["measurements.id"],
            name="fk_priced_runs_measurement_id_measurements",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("measurement_id", name="pk_priced_runs"),
    )


def downgrade() -> None:
    op.drop_table("priced_runs")
    op.drop_index("ix_measurements_learning", "measurements")
    for table, added in columns().items():
        for column in reversed(added):
            op.drop_column(table, column.name)


def _fill_trainers() -> None:
    """The trainer of each row; TorchTitan where its training names none."""
    table = sa.table(
        "measurements",
        sa.column("id", sa.String),
        sa.column("trainer", sa.Text),
        sa.column("body", sa.JSON),
    )
    bind = op.get_bind()
    trainers: dict[str, list[str]] = {}
    for row_id, body in bind.execute(sa.select(table.c.id, table.c.body)):
        training = body["row"].get("training") or {}
        trainers.setdefault(str(training.get("trainer", "torchtitan")), []).append(row_id)
    for trainer, ids in trainers.items():
        for start in range(0, len(ids), 500):
            chosen = table.c.id.in_(ids[start : start + 500])
            bind.execute(sa.update(table).where(chosen).values(trainer=trainer))
